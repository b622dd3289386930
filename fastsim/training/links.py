"""Links: which rows of a batch are no negatives of each other, because they share a text."""

import torch


class LinkedBatches:
    """Batches as lists of (row, links), which say what is no negative of what.

    batches: a batch sampler. numbers (N, T): the texts of each row as integers: anchor, positive,
    negatives. Rows of a batch that share an anchor or a positive, directly or through further rows,
    have one link; a negative has the link of the rows whose anchor or positive it is, else -1.
    links: (the row's, those of its negatives), or None where nothing in the batch is repeated.
    """

    drop_last = False

    def __init__(self, batches, numbers):
        self.batches, self.numbers = batches, numbers
        self.batch_size = batches.batch_size

    def set_epoch(self, epoch):
        """Choose the epoch of the next iteration."""
        self.batches.set_epoch(epoch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            yield list(zip(batch, self._links(batch), strict=True))

    def _links(self, batch):
        texts = self.numbers[batch]
        together = connected(texts[:, :2].tolist())
        names, found = {}, []
        for first, _, *negatives in texts.tolist():
            link = names.setdefault(together[first], len(names))
            found.append((link, negatives))
        links = [
            (link, *(names[together[text]] if text in together else -1 for text in negatives))
            for link, negatives in found
        ]
        apart = len(names) == len(batch) and all(max(link[1:], default=-1) < 0 for link in links)
        return [None] * len(batch) if apart else links


def connected(pairs):
    """Text -> one text of those that pairs connect it with, the same for all of these."""
    parent = {}

    def root(text):
        while parent.setdefault(text, text) != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for one, other in pairs:
        parent[root(one)] = root(other)
    return {text: root(text) for text in parent}


class LinkedRows(torch.utils.data.Dataset):
    """The rows of a data set asked for as (row, links); the links come with the row."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, places):
        rows = self.dataset.__getitems__([row for row, _ in places])
        return [row | {"links": links} for row, (_, links) in zip(rows, places, strict=True)]

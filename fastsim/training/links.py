"""Links mark the rows of a batch that share a text and therefore are no negatives of each other."""

import torch


class LinkedBatches:
    """Batches as lists of (row, links); texts with equal links are no negatives of each other.

    batches: a batch sampler. numbers: (N, T) the texts of each row as integers: anchor, positive,
    negatives. Rows of a batch that share an anchor or a positive, directly or through other rows,
    have the same link. A negative has the link of the rows whose anchor or positive it is, or -1.
    The links of a row are (link of the row, links of its negatives), or None if the batch repeats
    no text.
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
        component = connected(texts[:, :2].tolist())
        link_of = {}  # component -> link
        rows = [
            (link_of.setdefault(component[anchor], len(link_of)), negatives)
            for anchor, _, *negatives in texts.tolist()
        ]
        links = [
            (link, *(link_of[component[text]] if text in component else -1 for text in negatives))
            for link, negatives in rows
        ]
        negatives_distinct = all(max(link[1:], default=-1) < 0 for link in links)
        all_distinct = len(link_of) == len(batch) and negatives_distinct
        return [None] * len(batch) if all_distinct else links


def connected(pairs):
    """{text: a text that represents its connected component} of the graph with edges `pairs`."""
    parent = {}

    def root(text):
        while parent.setdefault(text, text) != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for first, second in pairs:
        parent[root(first)] = root(second)
    return {text: root(text) for text in parent}


class LinkedRows(torch.utils.data.Dataset):
    """The rows of a data set for `LinkedBatches`, each with its links."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, places):
        rows = self.dataset.__getitems__([row for row, _ in places])
        return [row | {"links": links} for row, (_, links) in zip(rows, places, strict=True)]

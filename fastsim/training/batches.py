"""Full batches that keep equal texts apart, the same for the same seed and epoch.

In-batch negatives are the texts of the other rows, so a batch should not hold a text twice. Rows
with repeated texts are assigned to batches first, and the others fill the remaining places. Every
batch but the last is full, and no row is left out. If a text occurs more often than there are
batches, some rows with it share a batch: `links.LinkedBatches` marks them, and the loss excludes
them from each other's negatives.
"""

import math
from collections import defaultdict

import numpy as np
import torch

from fastsim.training.assignment import Assignment


class UniqueBatches:
    """A batch sampler: lists of row numbers, with equal texts in different batches.

    texts: (N, T) integers, equal for equal texts; or for each row a sequence of hashable texts.
    batch_size: rows per batch; there are ceil(N / batch_size) batches, all full but one.
    share: whether rows of equal texts may share a batch if there are more of them than batches.
        With share=False they never do: full batches come first, and rows that fit in none of them
        form small ones.
    groups: the group of each row; up to `rows_per_group` rows of a group are put into one batch,
        so that it holds positives.
    topics: the topic of each row; batches are filled with rows of one topic, so that they hold hard
        negatives (Hofstätter et al. 2021, "Efficiently Teaching an Effective Dense Retriever with
        Balanced Topic Aware Sampling").
    `set_epoch` chooses the epoch; the number of batches is the same in all epochs.
    """

    drop_last = False

    def __init__(
        self, texts, batch_size, *, seed=0, share=True, groups=None, rows_per_group=4, topics=None
    ):
        if len(texts) == 0:
            raise ValueError("texts: wanted at least one row")
        if batch_size < 1:
            raise ValueError(f"batch_size: wanted at least 1, got {batch_size}")
        self.numbers = _numbers(texts)
        self._repeated, uses = _repeats(self.numbers)
        self._has_repeated = (self._repeated >= 0).any(1)
        others = np.append(uses - 1, 0)  # index -1 stands for no text
        self._clashes = others[self._repeated].sum(1)
        self.max_uses = int(uses.max(initial=1))
        self._rows = len(self.numbers)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self._groups, self._rows_per_group, self._topics = groups, rows_per_group, topics
        self._share, self._first_epoch = share, None
        self._count = math.ceil(self._rows / batch_size)
        if not share and self._has_repeated.any():
            # The number of batches is random; that of epoch 0 holds for all epochs.
            self._first_epoch = self._batches(torch.Generator().manual_seed(seed * 1_000_003))
            self._count = len(self._first_epoch)

    def set_epoch(self, epoch):
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self):
        return self._count

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        batches = self._batches(generator)
        if len(batches) != self._count:
            batches = self._first_epoch
        order = torch.randperm(self._count, generator=generator).tolist()
        yield from (batches[i] for i in order)

    def small_count(self):
        """The number of batches beyond ceil(N / batch_size), all of which are small."""
        return self._count - math.ceil(self._rows / self.batch_size)

    # ---- assignment to batches ----

    def _batches(self, generator):
        order = torch.randperm(self._rows, generator=generator).numpy()
        chunks, free = self._chunks(order)
        shuffle = torch.randperm(len(chunks), generator=generator).tolist()
        chunks = [chunks[i] for i in shuffle]
        # Chunks with the most clashes come first, then large ones. Rows of one text follow each
        # other, so that they are spread over the batches.
        chunks.sort(key=self._order_key)
        assignment = Assignment(self._rows, self.batch_size, self._texts_of, generator)
        for chunk in chunks:
            assignment.add(chunk)
        assignment.fill(free)
        shared = assignment.separate()
        if self._share or not shared:
            return assignment.batches()
        return self._first_fit([row for chunk in chunks for row in chunk], free)

    def _order_key(self, chunk):
        clashes = max(self._clashes[row] for row in chunk)
        text = max((t for row in chunk for t in self._texts_of(row)), default=-1)
        return -clashes, -len(chunk), text if len(chunk) == 1 else -1

    def _texts_of(self, row):
        """The repeated texts of a row, as numbers."""
        return [text for text in self._repeated[row].tolist() if text >= 0]

    def _chunks(self, order):
        """(lists of rows that go into one batch, rows that may go anywhere)."""
        if self._topics is not None:
            rows = order.tolist()
            if self._groups is not None:  # rows of a group follow each other within their topic
                rows = [row for group in _grouped(self._groups, rows) for row in group]
            return self._cut(_grouped(self._topics, rows), self.batch_size), []
        if self._groups is not None:
            return self._cut(_grouped(self._groups, order.tolist()), self._rows_per_group), []
        repeated = self._has_repeated[order]
        return [[row] for row in order[repeated].tolist()], order[~repeated].tolist()

    def _cut(self, parts, most):
        """The parts cut into chunks of up to `most` rows that hold no text twice."""
        chunks = []
        for rows in parts:
            chunk, texts = [], set()
            for row in rows:
                if len(chunk) == most or not texts.isdisjoint(self._texts_of(row)):
                    chunks.append(chunk)
                    chunk, texts = [], set()
                chunk.append(row)
                texts.update(self._texts_of(row))
            chunks.append(chunk)
        return chunks

    def _first_fit(self, repeated, free):
        """Batches that hold no text twice: each row goes into the first batch that it fits in."""
        batches, holds, first = [], [], 0
        after = defaultdict(int)  # text -> all batches before this one hold it or are full
        for row in repeated + free:
            texts = self._texts_of(row)
            place = max([first, *(after[text] for text in texts)])
            while place < len(batches) and (
                len(batches[place]) == self.batch_size or not holds[place].isdisjoint(texts)
            ):
                place += 1
            if place == len(batches):
                batches.append([])
                holds.append(set())
            batches[place].append(row)
            holds[place].update(texts)
            for text in texts:
                if len(texts) == 1 or place <= max(first, after[text]):
                    after[text] = place + 1
            while first < len(batches) and len(batches[first]) == self.batch_size:
                first += 1
        return batches


def _numbers(texts):
    """(N, T) integers, equal for equal texts; a row of fewer texts repeats its first."""
    if isinstance(texts, np.ndarray):
        return texts
    known, width = {}, max(map(len, texts))
    rows = [[known.setdefault(text, len(known)) for text in row] for row in texts]
    return np.array([row + row[:1] * (width - len(row)) for row in rows], dtype=np.int64)


def _repeats(numbers):
    """((N, T) indices of the texts that several rows hold, else -1; how many rows hold each)."""
    first = np.ones(numbers.shape, dtype=bool)  # a text that a row holds twice counts once
    for column in range(1, numbers.shape[1]):
        first[:, column] = (numbers[:, :column] != numbers[:, column : column + 1]).all(1)
    ordered = np.sort(numbers[first])
    values, uses = np.unique(ordered[1:][ordered[1:] == ordered[:-1]], return_counts=True)
    if not len(values):
        return np.full(numbers.shape, -1, dtype=np.int32), np.ones(0, dtype=np.int64)
    places = np.searchsorted(values, numbers).astype(np.int32)
    places[places == len(values)] = 0
    places[(values[places] != numbers) | ~first] = -1
    return places, uses + 1


def _grouped(keys, rows):
    """The lists of rows with equal keys, in the order of their first rows."""
    members = defaultdict(list)
    for row in rows:
        members[keys[row]].append(row)
    return members.values()


class SharedBatches:
    """The share of one process in every batch; all processes together have whole batches.

    batches: a batch sampler that is the same in all processes. If a batch has fewer rows than there
    are processes, a process without a row gets a `StandIn`, or with whole=True every process gets
    the whole batch. The latter is for losses that use no other row: then the processes have equal
    means, and so their average is the mean over the batch.
    """

    drop_last = False

    def __init__(self, batches, rank, ranks, *, whole=False):
        self.batches, self.rank, self.ranks, self.whole = batches, rank, ranks, whole
        self.batch_size = max(1, batches.batch_size // ranks)

    def set_epoch(self, epoch):
        """Choose the epoch of the next iteration."""
        has_epochs = hasattr(self.batches, "set_epoch")
        (self.batches if has_epochs else self.batches.sampler).set_epoch(epoch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            start, stop = (len(batch) * rank // self.ranks for rank in (self.rank, self.rank + 1))
            if self.whole and len(batch) < self.ranks:
                yield batch
            else:
                yield batch[start:stop] or StandIn(batch[:1])


class StandIn(list):
    """A row of another process, for a process without rows: an encoder takes at least one.

    Its embedding is removed before the loss, which gets no row from this process.
    """


class SharedRows(torch.utils.data.Dataset):
    """The rows of a data set for `SharedBatches`; the row of a `StandIn` is marked `stands_in`."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, places):
        rows = self.dataset.__getitems__(places)
        return [row | {"stands_in": True} for row in rows] if isinstance(places, StandIn) else rows

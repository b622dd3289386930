"""Batches without duplicate texts, the same for the same seed and epoch.

In-batch negatives take every other row's text for a negative, so a text must not be twice in a
batch. No row is dropped: rows are dealt, the ones with repeated texts first, each into the emptiest
batch that holds none of its texts, and there are enough batches that one always exists.
"""

import heapq
import math
from collections import Counter, defaultdict

import torch


class UniqueBatches:
    """A batch sampler: lists of row numbers, no text twice among the rows of a batch.

    texts: for each row the hashable texts it brings (those of one row may be equal). batch_size:
    rows per batch, passed by one only where repeated texts leave no other place. groups: for each
    row its group; rows of a group then come together, up to `together` of them, so that a batch
    holds positives. topics: for each row its topic; rows of a topic come together, as many as a
    batch holds, so that a batch holds hard negatives (Hofstätter et al. 2021, "Efficiently Teaching
    an Effective Dense Retriever with Balanced Topic Aware Sampling"). `set_epoch` chooses the
    epoch; the number of batches is the same in all.
    """

    drop_last = False

    def __init__(self, texts, batch_size, *, seed=0, groups=None, together=4, topics=None):
        if not texts:
            raise ValueError("texts: wanted at least one row")
        if batch_size < 1:
            raise ValueError(f"batch_size: wanted at least 1, got {batch_size}")
        numbers = {}
        self._texts = [{numbers.setdefault(text, len(numbers)) for text in row} for row in texts]
        uses = Counter(number for row in self._texts for number in row)
        # A row's texts can be in at most this many batches by other rows.
        self._clashes = [sum(uses[number] - 1 for number in row) for row in self._texts]
        count = max(math.ceil(len(texts) / batch_size), 1 + max(self._clashes))
        self._count = min(count, len(texts))
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0
        self._groups, self._together, self._topics = groups, together, topics

    def set_epoch(self, epoch):
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self):
        return self._count

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        chunks = self._chunks(torch.randperm(len(self._texts), generator=generator).tolist())
        order = torch.randperm(len(chunks), generator=generator).tolist()
        chunks = [chunks[i] for i in order]
        # Hard ones first: with repeated texts, then those that need much room.
        chunks.sort(key=lambda chunk: (-max(self._clashes[row] for row in chunk), -len(chunk)))
        ties = torch.randperm(self._count, generator=generator).tolist()
        heap = [(0, tie, batch) for batch, tie in enumerate(ties)]
        heapq.heapify(heap)
        batches = [[] for _ in range(self._count)]
        seen = [set() for _ in range(self._count)]
        for chunk in chunks:
            self._deal(chunk, heap, batches, seen)
        order = torch.randperm(self._count, generator=generator).tolist()
        yield from (batches[i] for i in order)

    def _chunks(self, order):
        """Rows that come together, by topic before group."""
        if self._topics is not None:
            if self._groups is not None:  # a group in one place within its topic
                order = [row for rows in _by(self._groups, order) for row in rows]
            return self._cut(_by(self._topics, order), self.batch_size)
        if self._groups is not None:
            return self._cut(_by(self._groups, order), self._together)
        return [[row] for row in order]

    def _cut(self, parts, most):
        """Parts of up to `most` rows without a text twice, at least as many as batches."""
        chunks = []
        for rows in parts:
            chunk, texts = [], set()
            for row in rows:
                if len(chunk) == most or texts & self._texts[row]:
                    chunks.append(chunk)
                    chunk, texts = [], set()
                chunk.append(row)
                texts |= self._texts[row]
            chunks.append(chunk)
        while len(chunks) < self._count:  # so that no batch stays empty
            largest = max(range(len(chunks)), key=lambda i: len(chunks[i]))
            chunk = chunks[largest]
            chunks[largest : largest + 1] = [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]]
        return chunks

    def _deal(self, chunk, heap, batches, seen):
        texts = set().union(*(self._texts[row] for row in chunk))
        passed = []
        while heap:
            size, tie, batch = heap[0]
            fits = size + len(chunk) <= self.batch_size
            if not fits and len(chunk) > 1:
                break  # the emptiest batch has no room for all: one by one
            if not texts & seen[batch]:
                heapq.heapreplace(heap, (size + len(chunk), tie, batch))
                batches[batch] += chunk
                seen[batch] |= texts
                chunk = []
                break
            passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        for row in chunk if len(chunk) > 1 else ():
            self._deal([row], heap, batches, seen)
        assert len(chunk) != 1, "a batch without the row's texts always exists"


def _by(keys, rows):
    """Lists of the rows of each key, in the order of their first."""
    members = defaultdict(list)
    for row in rows:
        members[keys[row]].append(row)
    return members.values()


class SharedBatches:
    """One process's share of every batch, so that all of them together take the batch of one.

    batches: a batch sampler that is the same in all processes. A batch of fewer rows than
    processes has rows that several take.
    """

    drop_last = False

    def __init__(self, batches, rank, ranks):
        self.batches, self.rank, self.ranks = batches, rank, ranks
        self.batch_size = max(1, batches.batch_size // ranks)

    def set_epoch(self, epoch):
        """Choose the epoch of the next iteration."""
        chooses = hasattr(self.batches, "set_epoch")
        (self.batches if chooses else self.batches.sampler).set_epoch(epoch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            start, stop = (len(batch) * rank // self.ranks for rank in (self.rank, self.rank + 1))
            yield batch[start:stop] or batch[start : start + 1]

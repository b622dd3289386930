"""Assigns rows to the batches of one epoch, with equal texts in different batches if possible.

A row goes to the emptiest batch that holds none of its texts. If there is none, it shares a batch
with an equal text; once all rows are assigned, such rows are exchanged with rows of other batches.
"""

import heapq
import math
import random
from collections import defaultdict

import numpy as np
import torch

_TRIES = 64  # batches tried for a row before it shares one with an equal text
_EXCHANGES = 512  # rows tried for an exchange with a row that shares a batch
_FAILURES = 4  # failed exchanges of rows of a text after which no more are tried


class Assignment:
    """The batches of one epoch while rows are assigned to them.

    rows: their number. texts_of: a function of a row; the numbers of its texts that other rows have
    too.
    """

    def __init__(self, rows, batch_size, texts_of, generator):
        count = math.ceil(rows / batch_size)
        self._texts = texts_of
        self._sizes = [batch_size] * (count - 1) + [rows - batch_size * (count - 1)]
        self._starts = np.cumsum([0, *self._sizes])
        self._slots = np.full(rows, -1, dtype=np.int64)
        self._used = [0] * count
        self._holds = [defaultdict(int) for _ in range(count)]  # text -> how many rows hold it
        self._spread = defaultdict(int)  # text -> how many batches hold it
        ties = torch.randperm(count, generator=generator).tolist()
        self._heap = [(0, ties[batch], batch) for batch in range(count)]  # the emptiest first
        heapq.heapify(self._heap)
        self._shared = []  # (row, batch) where another row of the batch has an equal text
        self._random = random.Random(ties[0])

    def add(self, chunk):
        """Put rows into the emptiest batch that has room for all and holds none of their texts."""
        texts = [text for row in chunk for text in self._texts(row)]
        tried, chosen = [], None
        everywhere = any(self._spread[text] == len(self._sizes) for text in texts)
        tries = 1 if everywhere else _TRIES
        while self._heap and len(tried) < tries:
            entry = heapq.heappop(self._heap)
            tried.append(entry)
            used, _, batch = entry
            if self._sizes[batch] - used < len(chunk):
                if len(chunk) > self._sizes[0] - used:
                    break  # no other batch has room for all of them
                continue
            if not any(text in self._holds[batch] for text in texts):
                chosen = len(tried) - 1
                break
        if chosen is None and len(chunk) == 1:
            chosen = 0
            self._shared.append((chunk[0], tried[0][2]))
        for number, (used, tie, batch) in enumerate(tried):
            if number == chosen:
                for row in chunk:
                    self._put(row, batch)
                used += len(chunk)
            if used < self._sizes[batch]:
                heapq.heappush(self._heap, (used, tie, batch))
        if chosen is None:
            for row in chunk:
                self.add([row])

    def _put(self, row, batch):
        self._slots[self._starts[batch] + self._used[batch]] = row
        self._used[batch] += 1
        for text in self._texts(row):
            self._spread[text] += not self._holds[batch][text]
            self._holds[batch][text] += 1

    def fill(self, rows):
        """Put rows without repeated texts into the remaining places."""
        self._slots[self._slots < 0] = rows

    def separate(self):
        """Exchange rows that share a batch with an equal text.

        Returns [(row, batch)] of those that still share one.
        """
        still_shared, failures = [], defaultdict(int)
        for row, batch in self._shared:
            texts = self._texts(row)
            if not any(self._holds[batch][text] > 1 for text in texts):
                continue  # the other row has been exchanged
            hopeless = any(failures[text] == _FAILURES for text in texts)
            if hopeless or not self._exchange(row, batch, texts):
                still_shared.append((row, batch))
                for text in texts:
                    failures[text] += self._holds[batch][text] > 1 and not hopeless
        return still_shared

    def _exchange(self, row, batch, texts):
        """Exchange a row with a random row of another batch. Returns whether one fitted."""
        slots = self._places(batch)
        slot = slots.start + int(np.flatnonzero(self._slots[slots] == row)[0])
        for _ in range(_EXCHANGES):
            other_slot = self._random.randrange(len(self._slots))
            other = int(np.searchsorted(self._starts, other_slot, side="right")) - 1
            partner = int(self._slots[other_slot])
            partner_texts = self._texts(partner)
            if other == batch or not (
                self._fits(other, texts, partner_texts) and self._fits(batch, partner_texts, texts)
            ):
                continue
            self._slots[slot], self._slots[other_slot] = partner, row
            for moved, old, new in ((texts, batch, other), (partner_texts, other, batch)):
                for text in moved:
                    self._holds[old][text] -= 1
                    self._holds[new][text] += 1
            return True
        return False

    def _fits(self, batch, texts, leaving):
        """Whether a batch holds none of the texts, without the texts of a row that is `leaving`."""
        return not any(self._holds[batch].get(text, 0) > (text in leaving) for text in texts)

    def _places(self, batch):
        return slice(int(self._starts[batch]), int(self._starts[batch + 1]))

    def batches(self):
        """The lists of rows."""
        return [self._slots[self._places(batch)].tolist() for batch in range(len(self._sizes))]

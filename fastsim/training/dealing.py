"""Rows dealt to the batches of one epoch, equal texts apart as far as that goes.

A row goes to the emptiest batch that holds none of its texts. Where there is none it shares a
batch; once all rows are dealt, such rows change places with rows of other batches where they can.
"""

import heapq
import math
import random
from collections import defaultdict

import numpy as np
import torch

_TRIES = 64  # batches looked at for a row before it shares one with an equal text
_EXCHANGES = 512  # rows looked at to change places with one that shares a batch
_FAILURES = 4  # such searches without success, before rows of a text are left where they are


class Table:
    """The batches of one epoch while rows are dealt to them.

    rows: how many; texts_of: row -> numbers of its texts that other rows have too.
    """

    def __init__(self, rows, batch_size, texts_of, generator):
        count = math.ceil(rows / batch_size)
        self._texts = texts_of
        self._rooms = [batch_size] * (count - 1) + [rows - batch_size * (count - 1)]
        self.most = self._rooms[0]
        self._starts = np.cumsum([0, *self._rooms])
        self._slots = np.full(rows, -1, dtype=np.int64)
        self._used = [0] * count
        self._holds = [defaultdict(int) for _ in range(count)]  # text -> how often
        self._spread = defaultdict(int)  # text -> how many batches hold it
        ties = torch.randperm(count, generator=generator).tolist()
        self._heap = [(0, ties[batch], batch) for batch in range(count)]  # the emptiest first
        heapq.heapify(self._heap)
        self._shared = []  # (row, batch) that another row of an equal text is in
        self._random = random.Random(ties[0])

    def deal(self, chunk):
        """Rows into the emptiest batch that has room and holds none of their texts."""
        texts = [text for row in chunk for text in self._texts(row)]
        passed, taken = [], None
        everywhere = any(self._spread[text] == len(self._rooms) for text in texts)
        tries = 1 if everywhere else _TRIES
        while self._heap and len(passed) < tries:
            entry = heapq.heappop(self._heap)
            passed.append(entry)
            if self._rooms[entry[2]] - entry[0] < len(chunk):
                if len(chunk) > self.most - entry[0]:
                    break  # nor has any other batch room for all of them
                continue
            if not any(text in self._holds[entry[2]] for text in texts):
                taken = len(passed) - 1
                break
        if taken is None and len(chunk) == 1:
            taken = 0
            self._shared.append((chunk[0], passed[0][2]))
        for number, (used, tie, batch) in enumerate(passed):
            if number == taken:
                for row in chunk:
                    self._put(row, batch)
                used += len(chunk)
            if used < self._rooms[batch]:
                heapq.heappush(self._heap, (used, tie, batch))
        if taken is None:
            for row in chunk:
                self.deal([row])

    def _put(self, row, batch):
        self._slots[self._starts[batch] + self._used[batch]] = row
        self._used[batch] += 1
        for text in self._texts(row):
            self._spread[text] += not self._holds[batch][text]
            self._holds[batch][text] += 1

    def fill(self, rows):
        """Rows without repeated texts into the places that are left."""
        self._slots[self._slots < 0] = rows

    def separate(self):
        """Exchange rows that share a batch for others; those that still do: (row, batch)."""
        left, failures = [], defaultdict(int)
        for row, batch in self._shared:
            mine = self._texts(row)
            if not any(self._holds[batch][text] > 1 for text in mine):
                continue  # the other one is gone
            stuck = any(failures[text] == _FAILURES for text in mine)
            if stuck or not self._exchange(row, batch, mine):
                left.append((row, batch))
                for text in mine:
                    failures[text] += self._holds[batch][text] > 1 and not stuck
        return left

    def _exchange(self, row, batch, mine):
        here = self._places(batch)
        place = here.start + int(np.flatnonzero(self._slots[here] == row)[0])
        for _ in range(_EXCHANGES):
            there = self._random.randrange(len(self._slots))
            other = int(np.searchsorted(self._starts, there, side="right")) - 1
            partner = int(self._slots[there])
            theirs = self._texts(partner)
            if other == batch or not (
                self._free(other, mine, theirs) and self._free(batch, theirs, mine)
            ):
                continue
            self._slots[place], self._slots[there] = partner, row
            for texts, old, new in ((mine, batch, other), (theirs, other, batch)):
                for text in texts:
                    self._holds[old][text] -= 1
                    self._holds[new][text] += 1
            return True
        return False

    def _free(self, batch, texts, leaving):
        return not any(self._holds[batch].get(text, 0) > (text in leaving) for text in texts)

    def _places(self, batch):
        return slice(int(self._starts[batch]), int(self._starts[batch + 1]))

    def batches(self):
        return [self._slots[self._places(batch)].tolist() for batch in range(len(self._rooms))]

"""The state of the whole matrix from those of its panels, added up in the order of the panels."""

import torch

from fastsim.kinds.kind import COLUMNS, OfPositive
from fastsim.tile import by_part


class States:
    """Collects the states of panels, band of rows by band of rows.

    sums: the parts of rows over all columns, where they are known; those that want them alone are
    added.
    """

    def __init__(self, tile, sums=None):
        self.tile, self.sums = tile, sums
        self.parts = [p for p in tile.parts if p.axis != COLUMNS and (sums is None or p.needs_row)]
        self.of_columns = [p for p in tile.parts if p.axis == COLUMNS]
        self.bands = []  # (first row, state of the rows)
        self.columns = {}  # first column -> state of the columns
        self.matrix = None

    def add(self, state, block):
        """Adds the state of a block, whose columns follow those of the block before."""
        rows, columns = block
        if self.tile.record.whole_matrix:
            self.matrix = state if self.matrix is None else self._merged(self.matrix, state)
            return
        state, of_columns = self.tile.split(state)
        state = state[0 if self.sums is None else len(self.sums) :]
        if self.bands and self.bands[-1][0] == rows.start:
            self.bands[-1] = rows.start, self._merged(self.bands[-1][1], state)
        else:
            self.bands.append((rows.start, state))
        if of_columns:
            before = self.columns.get(columns.start)
            if before is not None:
                of_columns = self.tile.merge(self.of_columns, before, of_columns)
            self.columns[columns.start] = of_columns

    def result(self):
        """The parts of the state."""
        if self.tile.record.whole_matrix:
            return self.matrix
        rows = _concatenated([band for _, band in self.bands])
        return [*(self.sums or ()), *rows, *_concatenated(list(self.columns.values()))]

    def _merged(self, state, more):
        merged = []
        for part, tensors in by_part(self.parts, list(zip(state, more, strict=True))):
            one, other = zip(*tensors, strict=True)
            if isinstance(part, OfPositive):  # 0 where the positive is in the other panel
                merged.append(one[0] + other[0])
            else:
                merged += part.merge(self.tile, one, other)
        return merged


def _concatenated(states):
    if len(states) <= 1:
        return states[0] if states else []
    return list(map(torch.cat, zip(*states, strict=True)))

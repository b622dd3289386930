"""The state of the whole matrix from those of its panels, added up in the order of the panels."""

import torch

from fastsim.kinds.kind import COLUMNS, OfPositive, joined
from fastsim.precision import wide_dtype
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
        self.bands = {}  # first row, or 0 of the whole matrix -> state
        self.columns = {}  # first column -> state of the columns

    def add(self, state, block):
        """Adds the state of a block, whose columns follow those of the block before."""
        rows, columns = block
        if self.tile.record.whole_matrix:
            self._add(self.bands, 0, self.parts, state)
            return
        state, of_columns = self.tile.split(state)
        state = state[0 if self.sums is None else len(self.sums) :]
        self._add(self.bands, rows.start, self.parts, state)
        if of_columns:
            self._add(self.columns, columns.start, self.of_columns, of_columns)

    def _add(self, found, place, parts, state):
        if place in found:
            found[place].add(state)
        else:
            found[place] = _Running(self.tile, parts, state)

    def result(self):
        """The parts of the state."""
        return [*(self.sums or ()), *_joined(self.bands), *_joined(self.columns)]


class _Running:
    """The state of some scores, to which that of others is added.

    Without float64 what rounding takes from the sums is kept beside them (Neumaier's summation).
    """

    def __init__(self, tile, parts, state):
        self.tile, self.parts, self.state = tile, parts, state
        narrow = wide_dtype(state[0].device) != torch.float64
        self.lost = [torch.zeros_like(tensor) for tensor in state] if narrow else None

    def add(self, more):
        """Adds the state of other scores, which come later."""
        merged, lost = [], []
        for part, tensors in by_part(self.parts, list(zip(self.state, more, strict=True))):
            one, other = zip(*tensors, strict=True)
            if isinstance(part, OfPositive):  # 0 where the positive is in the other panel
                both = [one[0] + other[0]]
            else:
                both = part.merge(self.tile, one, other)
            merged += both
            if self.lost is not None:
                lost += part.lost(self.tile, one, other, both)
        self.state = merged
        if self.lost is not None:
            pairs = zip(self.lost, lost, strict=True)
            self.lost = [before * factor + now for before, (now, factor) in pairs]

    def result(self):
        """The tensors of the state."""
        if self.lost is None:
            return self.state
        return [tensor + lost for tensor, lost in zip(self.state, self.lost, strict=True)]


def _joined(running):
    states = [each.result() for each in running.values()]
    return joined(states) if states else []

"""The state of the whole matrix, merged from the states of its panels in their order."""

import torch

from fastsim.kinds.kind import COLUMNS, OfPositive, joined
from fastsim.precision import wide_dtype
from fastsim.tile_loss import by_part


class States:
    """Merges the states of panels, one band of rows after the other.

    sums: None, or the first parts of rows over all columns; then only the parts that need these
        (`StatePart.needs_row`) are merged.
    """

    def __init__(self, tile, sums=None):
        self.tile, self.sums = tile, sums
        self.parts = [p for p in tile.parts if p.axis != COLUMNS and (sums is None or p.needs_row)]
        self.column_parts = [p for p in tile.parts if p.axis == COLUMNS]
        self.bands = {}  # first row of a band, or 0 for the whole matrix -> its state
        self.columns = {}  # first column -> state of these columns

    def add(self, state, block):
        """Adds the state of a block; the blocks of a band come in the order of their columns."""
        rows, columns = block
        if self.tile.record.whole_matrix:
            self._add(self.bands, 0, self.parts, state)
            return
        state, column_state = self.tile.split(state)
        state = state[0 if self.sums is None else len(self.sums) :]
        self._add(self.bands, rows.start, self.parts, state)
        if column_state:
            self._add(self.columns, columns.start, self.column_parts, column_state)

    def _add(self, running, place, parts, state):
        if place in running:
            running[place].add(state)
        else:
            running[place] = _Running(self.tile, parts, state)

    def result(self):
        """The tensors of the state."""
        return [*(self.sums or ()), *_joined(self.bands), *_joined(self.columns)]


class _Running:
    """A running state, into which the states of later scores are merged.

    Without float64, the rounding errors of the sums are kept beside them (Neumaier's summation).
    """

    def __init__(self, tile, parts, state):
        self.tile, self.parts, self.state = tile, parts, state
        narrow = wide_dtype(state[0].device) != torch.float64
        self.lost = [torch.zeros_like(tensor) for tensor in state] if narrow else None

    def add(self, more):
        """Merges the state of later scores."""
        merged, lost = [], []
        for part, tensors in by_part(self.parts, list(zip(self.state, more, strict=True))):
            one, other = zip(*tensors, strict=True)
            if isinstance(part, OfPositive):  # 0 if the positive is in the other panel
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

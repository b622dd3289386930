"""The memory of the panels of the CPU backend, and the operand of their product."""

import torch

from fastsim.backends.cpu import amx, memory

ODD = 16  # columns of padding


def panel_memory(unit_y, tall, wide):
    """Memory (tall, wide and some columns more) for panels of scores against unit_y.

    Off a power of two, so that a column of the panel spreads over the cache's sets.
    """
    compute = torch.promote_types(unit_y.dtype, torch.float32)
    return memory.empty((tall, wide + ODD), compute)


def panel_in(memory, block, first=0):
    """The panel of a block in `panel_memory` from the row `first` on."""
    rows, columns = block
    return memory[first : first + rows.stop - rows.start, : columns.stop - columns.start]


class Workspace:
    """The columns packed for the score product, and the memory of the panels.

    It holds one panel, which all share, and that of the first `kept_rows` rows of the matrix each
    in its place. Fresh memory for every panel would cost more in page faults than the pass over it.
    """

    def __init__(self, unit_y, tall, wide, kept_rows=0):
        self.columns = unit_y
        self.tiles = amx.Columns(unit_y) if amx.parts(unit_y.dtype) else None
        self.packed = None if self.tiles and self.tiles.usable else self._packed()
        self.memory = panel_memory(unit_y, max(tall, kept_rows), wide)
        self.shape = tall, wide
        self.kept_rows = kept_rows
        self._kept = {}
        self._beside = {}  # by what they are of

    def _packed(self):
        columns, width = self.columns.shape
        group = torch.ops.fastsim_cpu.panel_columns(self.columns.dtype == torch.float32)
        packed = memory.empty((-(-columns // group) * group, width), self.columns.dtype)
        torch.ops.fastsim_cpu.pack_panels(self.columns, packed)
        return packed

    def fill(self, panel, rows, first, *, add=False):
        """The scores of the rows against the columns from `first` on, or added to the panel."""
        if self.packed is None:
            if self.tiles.scores(rows, first, panel, add):
                return
            self.packed = self._packed()
        torch.ops.fastsim_cpu.scores(rows, self.packed[first:], panel, add)

    def beside(self, other):
        """The workspace of the panels of a `Guide` or of `Factors`."""
        kind = type(other)
        if kind not in self._beside:
            self._beside[kind] = Workspace(other.columns, *self.shape)
        return self._beside[kind]

    def panel(self, block):
        first = block[0].start if block[0].stop <= self.kept_rows else 0
        return panel_in(self.memory, block, first)

    def keep(self, block, panel):
        """Keeps the panel of a block, if it has a place of its own."""
        if block[0].stop <= self.kept_rows:
            self._kept[block[0].start] = panel

    def kept(self, block):
        """The panel of a block that was kept, once; else None."""
        return self._kept.pop(block[0].start, None)

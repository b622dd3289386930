"""The memory of the panels of the CPU backend, and the operand of their product."""

import torch

from fastsim.backends.cpu import amx, blas, memory
from fastsim.backends.cpu.unmade import UnitRows

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


# Rows of a block from which packing the columns again for each block costs next to nothing beside
# its product (kPackAgain in csrc/cpu/panel.h).
PACK_AGAIN = 240


class Columns:
    """The columns of the score product: unit_y (M, D), or `UnitRows`, which become the columns.

    again: packed for each block as they are multiplied, rather than once; the scores are the same.
    """

    def __init__(self, unit_y, *, again):
        self.rows = unit_y
        made = isinstance(unit_y, UnitRows)
        tiles = amx.parts_of(unit_y) and amx.PackedColumns(unit_y)
        self.tiles = tiles if tiles and tiles.usable else None
        self.by_blas = blas.serves(unit_y)
        self.again = made or again or self.by_blas
        self.packed = None if self.tiles or self.again else self._packed()

    def _packed(self):
        columns, width = self.rows.shape
        group = torch.ops.fastsim_cpu.panel_columns(self.rows.dtype == torch.float32)
        packed = memory.empty((-(-columns // group) * group, width), self.rows.dtype)
        torch.ops.fastsim_cpu.pack_panels(self.rows, packed)
        return packed

    def fill(self, panel, rows, first, *, add=False):
        """The scores of the rows against the columns from `first` on, or added to the panel."""
        if self.tiles:
            if self.tiles.scores(rows, first, panel, add):
                return
            self.tiles = None
        if self.by_blas:
            blas.scores(rows, self.rows, first, panel, add)
            return
        if self.again:
            made = isinstance(self.rows, UnitRows)
            columns, inverse = self.rows.from_row(first) if made else (self.rows[first:], None)
            torch.ops.fastsim_cpu.scores(rows, columns, inverse, panel, add)
            return
        if self.packed is None:
            self.packed = self._packed()
        torch.ops.fastsim_cpu.packed_scores(rows, self.packed[first:], panel, add)


class Workspace:
    """The columns of the score product, and the memory of the panels.

    It holds one panel, which all share, and that of the first `kept_rows` rows of the matrix each
    in its place. Fresh memory for every panel would cost more in page faults than the pass over it.
    """

    def __init__(self, unit_y, tall, wide, kept_rows=0):
        self.columns = Columns(unit_y, again=tall >= PACK_AGAIN)
        self.memory = panel_memory(unit_y, max(tall, kept_rows), wide)
        self.shape = tall, wide
        self.kept_rows = kept_rows
        self._kept = {}
        self._beside = {}  # by what they are of
        self._rows = None  # memory for rows that are made where they are looked at

    def fill(self, panel, rows, part, first):
        """The scores of a slice of the rows against the columns from `first` on."""
        if isinstance(rows, UnitRows):
            # Fresh memory for every block would leave holes between what is kept of each.
            if self._rows is None:
                self._rows = panel.new_empty(self.shape[0], rows.shape[1], dtype=rows.dtype)
            self.columns.fill(panel, rows.make(part, self._rows), first)
        else:
            self.columns.fill(panel, rows[part], first)

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

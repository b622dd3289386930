"""Memory for the panels of the CPU backend, and the columns that their products read."""

import torch

from fastsim.backends.cpu import amx, blas, memory
from fastsim.backends.cpu.lazy_rows import LazyUnitRows
from fastsim.precision import compute_dtype

ODD = 16  # columns of padding


def panel_memory(unit_y, tall, wide):
    """Memory (tall, wide + ODD) for panels of scores with unit_y.

    The columns of padding keep the length of a row from being a power of two, so that a column of
    the panel spreads over the sets of the cache.
    """
    compute = compute_dtype(unit_y)
    return memory.empty((tall, wide + ODD), compute)


def panel_in(memory, block, first=0):
    """The panel of a block in `panel_memory`, from its row `first` on."""
    rows, columns = block
    return memory[first : first + rows.stop - rows.start, : columns.stop - columns.start]


# From this many rows of a block on, packing the columns again for each block costs almost nothing
# compared with the product.
PACK_AGAIN = 240
# The most bytes of packed columns that are still in a near cache when the next block needs them
# (kCached in csrc/cpu/panel.h). With more, packing them once would not save time but take memory.
CACHED = 8 << 20


class Columns:
    """The right operand of scores: the rows of unit_y (M, D) or of `LazyUnitRows`.

    repack: whether to pack them for each block while it is multiplied, instead of once. The scores
    are the same.
    """

    def __init__(self, unit_y, *, repack):
        self.rows = unit_y
        lazy = isinstance(unit_y, LazyUnitRows)
        tiles = amx.parts_of(unit_y) and amx.PackedColumns(unit_y)
        self.tiles = tiles if tiles and tiles.usable else None
        self.by_blas = blas.serves(unit_y)
        self.repack = lazy or repack or self.by_blas
        self.packed = None if self.tiles or self.repack else self._packed()

    def _packed(self):
        columns, width = self.rows.shape
        group = torch.ops.fastsim_cpu.panel_columns(self.rows.dtype == torch.float32)
        packed = memory.empty((-(-columns // group) * group, width), self.rows.dtype)
        torch.ops.fastsim_cpu.pack_panels(self.rows, packed)
        return packed

    def fill(self, panel, rows, first, *, add=False):
        """Writes the scores of `rows` and the columns from `first` on; `add` adds them instead."""
        if self.tiles:
            if self.tiles.scores(rows, first, panel, add):
                return
            self.tiles = None
        if self.by_blas:
            blas.scores(rows, self.rows, first, panel, add)
            return
        if self.repack:
            lazy = isinstance(self.rows, LazyUnitRows)
            columns, inverse = self.rows.from_row(first) if lazy else (self.rows[first:], None)
            torch.ops.fastsim_cpu.scores(rows, columns, inverse, panel, add)
            return
        if self.packed is None:
            self.packed = self._packed()
        torch.ops.fastsim_cpu.packed_scores(rows, self.packed[first:], panel, add)


class Workspace:
    """The columns of the scores, and the memory of the panels.

    Each panel of the first `kept_rows` rows of the matrix has its own memory; the other panels
    share theirs. Fresh memory for every panel would cost more in page faults than the pass over it.
    """

    def __init__(self, unit_y, tall, wide, kept_rows=0):
        large = unit_y.shape[0] * unit_y.shape[1] * unit_y.dtype.itemsize > CACHED
        self.columns = Columns(unit_y, repack=tall >= PACK_AGAIN or large)
        self.memory = panel_memory(unit_y, max(tall, kept_rows), wide)
        self.shape = tall, wide
        self.kept_rows = kept_rows
        self._kept = {}
        self._beside = {}  # the workspaces of a guide and of factors, by type
        self._rows = None  # memory for rows of `LazyUnitRows`

    def fill(self, panel, rows, part, first):
        """Writes the scores of a slice of the rows and the columns from `first` on."""
        if isinstance(rows, LazyUnitRows):
            # Fresh memory for every block would leave gaps between the panels that are kept.
            if self._rows is None:
                self._rows = panel.new_empty(self.shape[0], rows.shape[1], dtype=rows.dtype)
            self.columns.fill(panel, rows.make(part, self._rows), first)
        else:
            self.columns.fill(panel, rows[part], first)

    def beside(self, other):
        """The workspace for the panels of `other`, a `Guide` or `Factors`."""
        kind = type(other)
        if kind not in self._beside:
            self._beside[kind] = Workspace(other.columns, *self.shape)
        return self._beside[kind]

    def panel(self, block):
        first = block[0].start if block[0].stop <= self.kept_rows else 0
        return panel_in(self.memory, block, first)

    def keep(self, block, panel):
        """Keeps the panel of a block, if it has its own memory."""
        if block[0].stop <= self.kept_rows:
            self._kept[block[0].start] = panel

    def kept(self, block):
        """The kept panel of a block, or None. It is forgotten when it is returned."""
        return self._kept.pop(block[0].start, None)

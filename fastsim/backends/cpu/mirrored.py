"""x compared with itself: only the scores above the diagonal are computed, each for two pairs.

Scores are symmetric. Score gradients G are not: G_ij depends on the score and the state of row i,
G_ji on the same score and the state of row j. A part of a panel yields the former, its transpose
the latter. The gradient is one product with H = G + G^T, which uses a block above the diagonal
twice:

    dunit[rows] += H unit[columns],  dunit[columns] += H^T unit[rows]

This saves half of each product, but needs two passes over the scores, as G_ji needs the finished
state of row j; three if some terms of that state need the finished sums of the row.
"""

import math
from dataclasses import replace

from fastsim.backends.cpu import amx, blas, memory, sizes
from fastsim.backends.cpu.passes import Operators, forward_of, pair_arguments, write_score_grad
from fastsim.backends.cpu.workspace import Workspace, panel_in, panel_memory
from fastsim.backends.panel import blocks_within

FEWEST = 1024  # rows: with fewer, too many of the scores are in blocks on the diagonal
# The smallest width D, for each number of parts (`amx.parts`). Products of narrower rows cost no
# more than the transposes and the second pass. Neither do products of one or two parts on a matrix
# unit, nor those of a BLAS library, at any width.
NARROWEST = {0: 128, 3: 256}
# Kinds with terms that need the finished sums of a row -> the kind whose state begins with these.
# Other kinds that need whole rows are not mirrored.
SUMS_OF = {"multi_positive": "debiased"}
SIDE = 192  # a block is a multiple of it high: whole register tiles, and whole column panels
MOST_SIDES = 2
WORTH_KEEPING = 8  # keeping fewer than 1/8 of the scores saves less than 3 % of the products
BANDS = 8  # of rows, at least: both halves of the blocks on the diagonal are computed


def mirrors(tile, unit):
    """Whether `Mirrored` can compute this loss of unit rows, and is faster."""
    pairs = tile.pairs
    options = (pairs.guide, pairs.exclude_above, pairs.column_bias, pairs.row_shift, pairs.factors)
    symmetric = all(option is None for option in options) and not pairs.offset
    by_parts = not tile.whole_rows or tile.kind in SUMS_OF
    by_rows = tile.rows_alone and by_parts and not tile.group
    # With hardness a second forward operator would find what the first has left out by ids.
    hidden = tile.hardness and pairs.row_ids is not None
    return by_rows and symmetric and not hidden and pays(unit)


def pays(unit):
    """Whether half of the products of rows with themselves cost more than mirroring them."""
    rows, width = unit.shape
    parts = amx.parts_of(unit) if amx.is_matrix_unit() else 0
    narrowest = math.inf if blas.serves(unit) else NARROWEST.get(parts, math.inf)
    return rows >= FEWEST and width >= narrowest


def bands(rows):
    """(the blocks of a pass over the scores of rows with themselves, their largest shape)."""
    panel = sizes.scores_of_a_panel()
    sides = min(MOST_SIDES, rows // (BANDS * SIDE), math.isqrt(panel) // SIDE)
    tall = SIDE * max(1, sides)
    wide = min(max(tall, panel // tall // SIDE * SIDE), rows)
    return list(blocks_within(rows, rows, tall, wide, lower=True)), (tall, wide)


def operators_of(rows, *, score_grad):
    """The operators on a band and on its transpose (csrc/cpu/mirrored.cpp).

    score_grad: whether each score becomes the sum of the score gradients of both its pairs.
    """
    return Operators("mirrored", rows, score_grad)


def pairs_of_band(pairs, block, rows):
    """The place of a block, and the arguments about all pairs, for `operators_of`."""
    everything = slice(0, rows), slice(0, rows)
    return *_place(block), *pair_arguments(pairs, everything)[2:]


def _place(block):
    return block[0].start, block[1].start


class _Workspace(Workspace):
    """A workspace whose panels get memory of their own, and are kept, while there is room.

    room: the number of scores that there is still room for. Bands have different widths, so that
    all of them have half of all scores.
    """

    def __init__(self, unit, tall, wide, room):
        super().__init__(unit, tall, wide)
        self.unit, self.room = unit, room

    def panel(self, block):
        rows, columns = block
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if height * width > self.room:
            return super().panel(block)
        self.room -= height * width
        self.keep(block, panel_in(panel_memory(self.unit, height, width), block))
        return self._kept[_place(block)]

    def keep(self, block, panel):
        self._kept[_place(block)] = panel

    def held(self, block):
        """The kept panel of a block, or None. It stays kept."""
        return self._kept.get(_place(block))

    def kept(self, block):
        return self._kept.pop(_place(block), None)


class Mirrored:
    """The passes that `Backend.mirrored` returns."""

    def __init__(self, backend, tile, unit, *, keep):
        self.backend, self.tile, self.unit = backend, tile, unit
        rows = len(unit)
        self.blocks, shape = bands(rows)
        # The forward pass subtracts the margin of a softmax from scores in a panel, and leaves out
        # pairs by their ids: for the pairs (i, j), not for (j, i). Such a panel cannot be kept.
        changed = tile.pairs.row_ids is not None or (tile.kind == "softmax" and tile.margin)
        self.keeps = keep and not changed
        worth_it = self.keeps and rows * rows <= 2 * sizes.KEPT * WORTH_KEEPING
        self.workspace = _Workspace(unit, *shape, sizes.KEPT if worth_it else 0)
        self.everything = slice(0, rows), slice(0, rows)

    def forward(self):
        """The state of the rows."""
        rows = len(self.unit)
        state = forward_of(self.tile, rows, rows)
        if self.tile.whole_rows:
            of_sums = forward_of(replace(self.tile, kind=SUMS_OF[self.tile.kind]), rows, rows)
            self._add_scores(of_sums)
            state.know(of_sums.result()[:2])
        panel = self._add_scores(state)
        if self.keeps:  # the last panel is the first that `gradient` needs
            self.workspace.keep(self.blocks[0], panel)
        return state.result()

    def _add_scores(self, state):
        """Adds all scores to a state. Returns the panel of the first block, which comes last."""
        unit, rows = self.unit, len(self.unit)
        state.library = operators_of(rows, score_grad=False)
        for block in reversed(self.blocks):
            panel = self.workspace.held(block)
            if panel is None:
                panel = self.backend.scores(unit, unit, block, self.workspace, self.tile)
            state.add(panel, pairs_of_band(self.tile.pairs, block, rows), self.everything)
        self.workspace.room = 0
        return panel

    def gradient(self, coefficients, dtype):
        """The gradient of the unit rows, in `dtype`."""
        multiply, unit = self.backend.multiply, self.unit
        library = operators_of(len(unit), score_grad=True)
        grad = memory.empty(unit.shape, dtype)
        for block in self.blocks:
            rows, columns = block
            panel = self.workspace.kept(block)
            if panel is None:
                panel = self.backend.scores(unit, unit, block, self.workspace, self.tile)
            pairs = pairs_of_band(self.tile.pairs, block, len(unit))
            write_score_grad(self.tile, panel, pairs, self.everything, coefficients, library)
            # The first band of rows reaches every column. It is the first to write each row.
            later = rows.start > 0
            multiply(panel, unit[columns], grad[rows], accumulate=later or columns.start > 0)
            beyond = slice(max(columns.start, rows.stop), columns.stop)
            if beyond.start < beyond.stop:
                above_diagonal = panel[:, beyond.start - columns.start :]
                multiply(above_diagonal.t(), unit[rows], grad[beyond], accumulate=later)
        return grad

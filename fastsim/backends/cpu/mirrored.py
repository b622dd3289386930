"""x compared with itself: only the scores above the diagonal are computed, each for two pairs.

Scores are symmetric. Score gradients G are not: G_ij depends on the score and the state of row i,
G_ji on the same score and the state of row j. A part of a panel yields the former, its transpose
the latter. The gradient is one product with H = G + G^T, which uses a block above the diagonal
twice:

    dunit[rows] += H unit[columns],  dunit[columns] += H^T unit[rows]

This saves half of each product, but needs two passes over the scores, as G_ji needs the finished
state of row j.
"""

import math

import torch

from fastsim.backends.cpu import amx, blas, memory
from fastsim.backends.cpu.passes import forward_of, pair_arguments, write_score_grad
from fastsim.backends.cpu.workspace import Workspace, panel_in, panel_memory
from fastsim.backends.panel import blocks_within

FEWEST = 1024  # rows: with fewer, too many of the scores are in blocks on the diagonal
# The smallest width D, for each number of parts (`amx.parts`). Products of narrower rows cost no
# more than the transposes and the second pass. Neither do products of one or two parts on a matrix
# unit, nor those of a BLAS library, at any width.
NARROWEST = {0: 128, 3: 256}
SIDE = 192  # a block is a multiple of it high: whole register tiles, and whole column panels
MOST_SIDES = 2
BANDS = 8  # of rows, at least: both halves of the blocks on the diagonal are computed
PART = 1 << 17  # scores transposed at a time: half a megabyte in float32, which stays in cache


def mirrors(tile, unit):
    """Whether `Mirrored` can compute this loss of unit rows, and is faster."""
    rows, width = unit.shape
    parts = amx.parts_of(unit) if amx.is_matrix_unit() else 0
    narrowest = math.inf if blas.serves(unit) else NARROWEST.get(parts, math.inf)
    faster = rows >= FEWEST and width >= narrowest
    pairs = tile.pairs
    options = (pairs.guide, pairs.exclude_above, pairs.column_bias, pairs.row_shift, pairs.factors)
    symmetric = all(option is None for option in options) and not pairs.offset
    by_rows = tile.rows_alone and not tile.whole_rows and not tile.group
    return by_rows and symmetric and faster


class Mirrored:
    """The passes that `Backend.mirrored` returns."""

    def __init__(self, backend, tile, unit, panel, kept):
        self.backend, self.tile, self.unit = backend, tile, unit
        rows = len(unit)
        # With a margin or ids the forward pass changes the scores in a panel, for the pairs (i, j)
        # but not for (j, i), so the panel cannot be kept. All scores are kept or none: memory for
        # some of them would come on top of the memory that a large batch takes.
        changed = tile.margin or tile.pairs.row_ids is not None
        kept = 0 if changed or kept < rows * rows else rows
        sides = min(MOST_SIDES, rows // (BANDS * SIDE), math.isqrt(panel) // SIDE)
        tall = SIDE * max(1, sides)
        wide = max(tall, panel // tall // SIDE * SIDE)
        self.shape = tall, min(wide, rows)
        self.workspace = Workspace(unit, *self.shape, kept if wide >= rows else 0)
        self.transposed = panel_memory(unit, max(PART // tall, tall), tall)

    def _blocks(self):
        rows = len(self.unit)
        return list(blocks_within(rows, rows, *self.shape, lower=True))

    def _parts(self, block, panel):
        """Yields (part of the panel, its block, memory for its transpose) for each part.

        The memory is None for the part on the diagonal, which contains its own transpose.
        """
        rows, columns = block
        left = columns.start
        while left < columns.stop:
            on_diagonal = left < rows.stop
            width = rows.stop - left if on_diagonal else self.transposed.shape[0]
            part = slice(left, min(columns.stop, left + width))
            transposed = None if on_diagonal else panel_in(self.transposed, (part, rows))
            inside = slice(part.start - columns.start, part.stop - columns.start)
            yield panel[:, inside], (rows, part), transposed
            left = part.stop

    def forward(self):
        """The state of the rows."""
        rows = len(self.unit)
        state = forward_of(self.tile, rows, rows)
        for block in reversed(self._blocks()):
            panel = self.backend.scores(self.unit, self.unit, block, self.workspace, self.tile)
            for part, place, transposed in self._parts(block, panel):
                if transposed is not None:
                    torch.ops.fastsim_cpu.transpose(part, transposed, False)
                    self._add(state, transposed, place[::-1])
                self._add(state, part, place)
            self.workspace.keep(block, panel)
        return state.result()

    def _add(self, state, panel, block):
        state.add(panel, pair_arguments(self.tile.pairs, block), block)

    def gradient(self, coefficients, dtype):
        """The gradient of the unit rows, in `dtype`."""
        multiply, unit = self.backend.multiply, self.unit
        grad = memory.empty(unit.shape, dtype)
        for block in self._blocks():
            rows, columns = block
            panel = self.workspace.kept(block)
            if panel is None:
                panel = self.backend.scores(unit, unit, block, self.workspace, self.tile)
            for part, place, transposed in self._parts(block, panel):
                self._write(part, place, transposed, coefficients)
            # The first band of rows reaches every column. It is the first to write each row.
            later = rows.start > 0
            multiply(panel, unit[columns], grad[rows], accumulate=later or columns.start > 0)
            beyond = slice(max(columns.start, rows.stop), columns.stop)
            if beyond.start < beyond.stop:
                above_diagonal = panel[:, beyond.start - columns.start :]
                multiply(above_diagonal.t(), unit[rows], grad[beyond], accumulate=later)
        return grad

    def _write(self, part, place, transposed, coefficients):
        """Replaces the scores of a part of a panel by its part of H."""
        if transposed is not None:
            torch.ops.fastsim_cpu.transpose(part, transposed, False)
            self._score_grad(transposed, place[::-1], coefficients)
        self._score_grad(part, place, coefficients)
        if transposed is None:
            transposed = panel_in(self.transposed, place)
            transposed.copy_(part)
        torch.ops.fastsim_cpu.transpose(transposed, part, True)

    def _score_grad(self, panel, block, coefficients):
        pairs = pair_arguments(self.tile.pairs, block)
        write_score_grad(self.tile, panel, pairs, block, coefficients)

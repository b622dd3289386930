"""Rows against themselves: the scores above the diagonal, each of which is that of two pairs.

Scores are symmetric, score gradients G are not: that of (i, j) follows from the score and the state
of row i, that of (j, i) from the same score and the state of row j. So a part of a panel and its
transpose give both, and one product with H = G + G^T gives the gradient, of which a block above the
diagonal is used twice, as it is and transposed:

    dunit[rows] += H unit[columns],  dunit[columns] += H^T unit[rows]

Half of each product is spared. That is worth a second look at the scores, which the state of the
columns' rows makes necessary.
"""

import math

import torch

from fastsim.backends.cpu import amx, blas
from fastsim.backends.cpu.passes import forward_of, pair_arguments, write_score_grad
from fastsim.backends.cpu.workspace import Workspace, panel_in, panel_memory
from fastsim.backends.panel import blocks_within

FEWEST = 1024  # rows: of fewer, blocks on the diagonal are too much of the whole
# Columns of an embedding, by `amx.parts`: products of fewer cost no more than the transposes and a
# second look, and on a matrix unit in one or two parts those of any, as by a BLAS library.
NARROWEST = {0: 128, 3: 256}
SIDE = 192  # rows of a block are a multiple: whole register tiles, and whole column panels
MOST_SIDES = 2
BANDS = 8  # the fewest: of the blocks on the diagonal both halves are computed
PART = 1 << 17  # scores turned over at a time: half a megabyte in float32, near the processor


def mirrors(tile, unit):
    """Whether the pairs of rows with themselves are served, and it pays."""
    rows, width = unit.shape
    parts = amx.parts_of(unit) if amx.is_matrix_unit() else 0
    narrowest = math.inf if blas.serves(unit) else NARROWEST.get(parts, math.inf)
    pays = rows >= FEWEST and width >= narrowest
    pairs = tile.pairs
    moved = (pairs.guide, pairs.exclude_above, pairs.column_bias, pairs.row_shift, pairs.factors)
    symmetric = all(value is None for value in moved) and not pairs.offset
    alone = tile.rows_alone and not tile.whole_rows and not tile.group
    return alone and symmetric and pays


class Mirrored:
    """What `Backend.mirrored` returns."""

    def __init__(self, backend, tile, unit, panel, kept):
        self.backend, self.tile, self.unit = backend, tile, unit
        rows = len(unit)
        # The forward pass leaves in a panel what it makes of its rows' pairs, which the pairs
        # turned round have nothing to do with. All scores are kept or none: memory for some would
        # come on top of what a large batch takes.
        marked = tile.margin or tile.pairs.row_ids is not None
        kept = 0 if marked or kept < rows * rows else rows
        sides = min(MOST_SIDES, rows // (BANDS * SIDE), math.isqrt(panel) // SIDE)
        tall = SIDE * max(1, sides)
        wide = max(tall, panel // tall // SIDE * SIDE)
        self.shape = tall, min(wide, rows)
        self.workspace = Workspace(unit, *self.shape, kept if wide >= rows else 0)
        self.turned = panel_memory(unit, max(PART // tall, tall), tall)

    def _blocks(self):
        rows = len(self.unit)
        return list(blocks_within(rows, rows, *self.shape, lower=True))

    def _parts(self, block, panel):
        """(part of the panel, its block, memory for its transpose) of each part.

        That on the diagonal holds its own transpose, and has None for the memory.
        """
        rows, columns = block
        at = columns.start
        while at < columns.stop:
            own = at < rows.stop
            width = rows.stop - at if own else self.turned.shape[0]
            part = slice(at, min(columns.stop, at + width))
            turned = None if own else panel_in(self.turned, (part, rows))
            inside = slice(part.start - columns.start, part.stop - columns.start)
            yield panel[:, inside], (rows, part), turned
            at = part.stop

    def forward(self):
        """The state of the rows."""
        rows = len(self.unit)
        state = forward_of(self.tile, rows, rows)
        for block in reversed(self._blocks()):
            panel = self.backend.scores(self.unit, self.unit, block, self.workspace, self.tile)
            for part, place, turned in self._parts(block, panel):
                if turned is not None:
                    torch.ops.fastsim_cpu.transpose(part, turned, False)
                    self._add(state, turned, place[::-1])
                self._add(state, part, place)
            self.workspace.keep(block, panel)
        return state.result()

    def _add(self, state, panel, block):
        state.add(panel, pair_arguments(self.tile.pairs, block), block)

    def gradient(self, coefficients, dtype):
        """dL/dunit in `dtype`."""
        multiply, unit = self.backend.multiply, self.unit
        grad = torch.zeros(unit.shape, dtype=dtype, device=unit.device)
        for block in self._blocks():
            rows, columns = block
            panel = self.workspace.kept(block)
            if panel is None:
                panel = self.backend.scores(unit, unit, block, self.workspace, self.tile)
            for part, place, turned in self._parts(block, panel):
                self._write(part, place, turned, coefficients)
            multiply(panel, unit[columns], grad[rows], accumulate=True)
            beyond = slice(max(columns.start, rows.stop), columns.stop)
            if beyond.start < beyond.stop:
                of_beyond = panel[:, beyond.start - columns.start :]
                multiply(of_beyond.t(), unit[rows], grad[beyond], accumulate=True)
        return grad

    def _write(self, part, place, turned, coefficients):
        """H of a part of a panel in the place of its scores."""
        if turned is not None:
            torch.ops.fastsim_cpu.transpose(part, turned, False)
            self._score_grad(turned, place[::-1], coefficients)
        self._score_grad(part, place, coefficients)
        if turned is None:
            turned = panel_in(self.turned, place)
            turned.copy_(part)
        torch.ops.fastsim_cpu.transpose(turned, part, True)

    def _score_grad(self, panel, block, coefficients):
        pairs = pair_arguments(self.tile.pairs, block)
        write_score_grad(self.tile, panel, pairs, block, coefficients)

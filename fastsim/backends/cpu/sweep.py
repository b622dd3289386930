"""The panels of a sweep over prefixes on a CPU (the terms: fastsim/engine/sweep.py)."""

import torch

from fastsim.backends.cpu import memory, sizes
from fastsim.backends.cpu.both_ways import BothWays, common_top
from fastsim.backends.cpu.passes import in_type, pair_arguments, sweep_of, write_score_grad
from fastsim.backends.cpu.workspace import ODD, Columns
from fastsim.backends.panel import blocks_within

# Kinds each of whose steps on the rows of panels is one operator.
SWEPT = ("softmax", "sigmoid", "squared_error")


class _Steps:
    """The operators on the panels of all widths, which hold products of own columns before."""

    def __init__(self, *given):
        self._given = given

    def __getattr__(self, name):
        operator = getattr(torch.ops.fastsim_cpu, f"sweep_{name}")
        return lambda panels, *rest: operator(panels, *self._given, *rest)


def _of_block(values, part):
    return None if values is None else values[:, part]


class CpuSweep:
    """What `Backend.sweep` returns. A panel for each width, first of the products of its own
    columns, which become scores and their gradients row by row, of all widths.

    keep: where the forward reduction leaves the products as they are, those of the first rows are
    kept for the score gradients.
    """

    def __init__(self, tile, x, y, shape, keep):
        self.tile, self.x, self.y = tile, x, y
        self.shape = shape
        self.columns = [Columns(columns, again=True) for columns in y.rows]
        tall, wide = shape
        dtype = torch.promote_types(y.rows[0].dtype, torch.float32)
        self.widths = len(x.rows)
        top = common_top(tile)
        self.both = None if top is None else BothWays(tile, len(x), len(y), self.widths, top)
        keep = keep and self.both is not None and wide == len(y)
        self.kept_rows = sizes.rows_kept(len(x), shape, self.widths) if keep else 0
        self._kept = set()  # first rows of blocks
        self.panels = memory.empty((self.widths, max(tall, self.kept_rows), wide + ODD), dtype)
        self.ratios = [torch.stack(side.ratios) if side.ratios else None for side in (x, y)]
        zeros = [torch.stack(side.zeros) if side.zeros else None for side in (x, y)]
        some = any(of_side is not None and of_side.any() for of_side in zeros)
        self.zeros = zeros if some else (None, None)
        self.row_dots, self.column_dots = (
            torch.zeros(self.widths - 1, count, dtype=torch.float64) for count in (len(x), len(y))
        )

    def blocks(self):
        return blocks_within(len(self.x), len(self.y), *self.shape)

    def forward(self):
        state = self.both or sweep_of(self.tile, len(self.x), len(self.y), self.widths, None)
        # The first blocks come last: the score gradients begin with what was kept of them.
        for block in reversed(list(self.blocks())):
            panels, pairs = self._products(block), self._pairs(block)
            state.library = self._steps(block, dots=False)
            state.add(panels, pairs, block)
            if block[0].stop <= self.kept_rows:
                self._kept.add(block[0].start)
        return _by_width(state)

    def fused_pass(self, block, weights):
        panels, tile = self._products(block), self.tile.of_rows(block[0])
        state = sweep_of(tile, *panels.shape[1:], self.widths, self._steps(block))
        state.fused_pass(panels, self._pairs(block), weights[:, block[0]])
        return _by_width(state), panels

    def coefficients(self, states, weights):
        dtype = self.panels.dtype
        if self.both is not None:
            return self.both.coefficients(states, weights, dtype)
        of_widths = zip(
            *(
                in_type(dtype, self.tile.coefficients(state, of_width.double()))
                for state, of_width in zip(states, weights, strict=True)
            ),
            strict=True,
        )
        return [None if parts[0] is None else torch.stack(parts) for parts in of_widths]

    def score_grad(self, block, coefficients):
        panels, pairs, steps = self._products(block), self._pairs(block), self._steps(block)
        if self.both is not None:
            self.both.library = steps
            self.both.score_grad(panels, pairs, block, coefficients)
        else:
            write_score_grad(self.tile, panels, pairs, block, coefficients, steps)
        return panels

    def _products(self, block):
        """The panels of a block, of the products of each width's own columns."""
        rows, columns = block
        size = rows.stop - rows.start, columns.stop - columns.start
        first = rows.start if rows.stop <= self.kept_rows else 0
        panels = self.panels[:, first : first + size[0], : size[1]]
        if rows.start in self._kept:
            self._kept.discard(rows.start)
            return panels
        for of_width, panel, own in zip(self.columns, panels, self.x.rows, strict=True):
            of_width.fill(panel, own[rows], columns.start)
        return panels

    def _pairs(self, block):
        return pair_arguments(self.tile.pairs, block)

    def _steps(self, block, *, dots=True):
        of_sides = [
            _of_block(values, part)
            for both in (self.ratios, self.zeros, (self.row_dots, self.column_dots))
            for values, part in zip(both, block, strict=True)
        ]
        if not dots:
            of_sides[4:] = None, None
        return _Steps(*of_sides)


def _by_width(state):
    """The states of the widths, of one of all of them."""
    return [list(parts) for parts in zip(*state.result(), strict=True)]

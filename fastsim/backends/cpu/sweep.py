"""The panels of a sweep over prefixes on a CPU (the terms: fastsim/engine/sweep.py)."""

import torch

from fastsim.backends.cpu.passes import pair_arguments, sweep_of, write_score_grad
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
    """

    def __init__(self, tile, x, y, shape):
        self.tile, self.x, self.y = tile, x, y
        self.shape = shape
        self.columns = [Columns(columns, again=True) for columns in y.rows]
        tall, wide = shape
        dtype = torch.promote_types(y.rows[0].dtype, torch.float32)
        self.widths = len(x.rows)
        self.panels = torch.empty(self.widths, tall, wide + ODD, dtype=dtype)
        self.ratios = [torch.stack(side.ratios) if side.ratios else None for side in (x, y)]
        zeros = [torch.stack(side.zeros) if side.zeros else None for side in (x, y)]
        some = any(of_side is not None and of_side.any() for of_side in zeros)
        self.zeros = zeros if some else (None, None)
        self.row_dots, self.column_dots = (
            torch.zeros(self.widths, count, dtype=torch.float64) for count in (len(x), len(y))
        )

    def blocks(self):
        return blocks_within(len(self.x), len(self.y), *self.shape)

    def forward(self):
        state = sweep_of(self.tile, len(self.x), len(self.y), self.widths, None)
        for block in self.blocks():
            state.library = self._steps(block, dots=False)
            state.add(self._products(block), pair_arguments(self.tile.pairs, block), block)
        return _by_width(state)

    def fused_pass(self, block, weights):
        panels, tile = self._products(block), self.tile.of_rows(block[0])
        state = sweep_of(tile, *panels.shape[1:], self.widths, self._steps(block))
        pairs = pair_arguments(self.tile.pairs, block)
        state.fused_pass(panels, pairs, weights[:, block[0]])
        return _by_width(state), panels

    def score_grad(self, block, coefficients):
        panels, pairs = self._products(block), pair_arguments(self.tile.pairs, block)
        write_score_grad(self.tile, panels, pairs, block, coefficients, self._steps(block))
        return panels

    def _products(self, block):
        """The panels of a block, of the products of each width's own columns."""
        rows, columns = block
        size = rows.stop - rows.start, columns.stop - columns.start
        panels = self.panels[:, : size[0], : size[1]]
        for of_width, panel, own in zip(self.columns, panels, self.x.rows, strict=True):
            of_width.fill(panel, own[rows], columns.start)
        return panels

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

"""The panels of a sweep over prefixes on a CPU (the terms: fastsim/engine/sweep.py)."""

import torch

from fastsim.backends.cpu import amx, blas, memory, sizes
from fastsim.backends.cpu.both_ways import BothWays, common_top
from fastsim.backends.cpu.passes import (
    Operators,
    in_type,
    pair_arguments,
    state_of,
    sweep_of,
    write_score_grad,
)
from fastsim.backends.cpu.workspace import ODD, Columns
from fastsim.backends.panel import blocks_within
from fastsim.precision import compute_dtype

SWEPT = ("softmax", "sigmoid", "squared_error")  # kinds that csrc/cpu/sweep.cpp has operators for


def _of_block(values, part):
    return None if values is None else values[:, part]


class CpuSweep:
    """The passes that `Backend.sweep` returns.

    Each width has a panel. It first holds the products of the width's own columns; these become
    scores, and then score gradients, row by row for all widths at once.

    An operator also computes the products before and after it, for a part of a block at a time, in
    its own memory. On a matrix unit and with a BLAS library the products are separate operators. So
    a whole block has panels only with such products, or for a softmax of rows in two passes. For a
    softmax of rows and columns with `keep`, the first rows of the matrix have panels too: they keep
    the products of forward() for score_grad().
    """

    def __init__(self, tile, x, y, *, whole_rows, keep):
        self.tile, self.x, self.y = tile, x, y
        self.widths = len(x.rows)
        self.dtype = compute_dtype(y.rows[0])
        self.columns = None
        by_amx = amx.serves_sweep(amx.parts_of(y.rows[0]))
        if by_amx and isinstance(y.rows[0], amx.ScaledRows):
            amx.keep_first(y.rows)
        if by_amx or blas.serves(y.rows[0]):
            self.columns = [Columns(columns, repack=True) for columns in y.rows]
        top = common_top(tile)
        self.both_ways = None if top is None else BothWays(tile, len(x), len(y), self.widths, top)
        # Whether all scores of a block are in memory before an operator uses them.
        softmax = tile.kind == "softmax"
        two_passes = softmax and self.both_ways is None and not whole_rows
        self.whole = self.columns is not None or two_passes
        panels = sizes.SWEEP if self.columns is not None or softmax else 1
        self.shape = tall, wide = sizes.block_shape(len(x), len(y), whole_rows, panels=panels)
        # The number of rows of a block that have panels; whether these keep the forward products.
        self.rows, self.kept = tall if self.whole else 0, False
        if self.both_ways is not None and not self.whole:
            self.shape = max(1, len(x)), wide  # few blocks, as each one packs the columns again
            if keep and wide == len(y):
                most = sizes.KEPT_IN_SWEEP // self.widths
                self.rows = sizes.rows_kept(len(x), (sizes.TILE_ROWS, wide), most)
        shape = (self.widths, self.rows, wide + ODD) if self.rows else (self.widths, 0, 0)
        self.panels = memory.empty(shape, self.dtype)
        self.ratios = [torch.stack(side.ratios) if side.ratios else None for side in (x, y)]
        zeros = [torch.stack(side.zeros) if side.zeros else None for side in (x, y)]
        any_zeros = any(side_zeros is not None and side_zeros.any() for side_zeros in zeros)
        self.zeros = zeros if any_zeros else (None, None)
        self.row_dots, self.column_dots = (state_of(self.widths - 1, len(side)) for side in (x, y))

    def blocks(self):
        return blocks_within(len(self.x), len(self.y), *self.shape)

    def forward(self):
        state = self.both_ways or sweep_of(self.tile, len(self.x), len(self.y), self.widths, None)
        for block in self.blocks():
            state.library = self._operators(block)
            state.add(self._panels(block), self._pairs(block), block)
        self.kept = not self.whole
        return _by_width(state)

    def fused_pass(self, block, weights, products):
        tile, pairs, panels = self.tile.of_rows(block[0]), self._pairs(block), self._panels(block)
        rows, columns = block
        size = rows.stop - rows.start, columns.stop - columns.start
        state = sweep_of(tile, *size, self.widths, None)
        weights = weights[:, rows]
        whole_rows = tile.kind == "softmax"
        with _ScoreGradContext(self, block, products, whole_rows=whole_rows) as state.library:
            state.fused_pass(panels, pairs, weights)
        return _by_width(state)

    def coefficients(self, states, weights):
        if self.both_ways is not None:
            return self.both_ways.coefficients(states, weights, self.dtype)
        by_width = [
            in_type(self.dtype, self.tile.coefficients(state, row_weights.double()))
            for state, row_weights in zip(states, weights, strict=True)
        ]
        by_coefficient = zip(*by_width, strict=True)
        return [None if parts[0] is None else torch.stack(parts) for parts in by_coefficient]

    def score_grad(self, block, coefficients, products):
        pairs, panels = self._pairs(block), self._panels(block)
        with _ScoreGradContext(self, block, products, filled=self.kept) as operators:
            if self.both_ways is not None:
                self.both_ways.library = operators
                self.both_ways.score_grad(panels, pairs, block, coefficients)
            else:
                write_score_grad(self.tile, panels, pairs, block, coefficients, operators)

    def _panels(self, block):
        """The panels of a block, or of its first rows where only these have panels."""
        rows, columns = block
        tall = rows.stop - rows.start if self.whole else self.rows
        return self.panels[:, :tall, : columns.stop - columns.start]

    def _pairs(self, block):
        return pair_arguments(self.tile.pairs, block)

    def _fill(self, block):
        """Writes the products of each width's own columns to its panel."""
        rows, columns = block
        widths = zip(self.columns, self._panels(block), self.x.rows, strict=True)
        for width_columns, panel, width_rows in widths:
            width_columns.fill(panel, width_rows[rows], columns.start)

    def _operators(self, block, gradients=None, *, filled=False, whole_rows=False):
        """The `Operators` of a block (csrc/cpu/sweep.cpp).

        gradients: (list, list) of memory for the gradients of the rows and of the columns, one for
            each width or none; None for a forward pass.
        filled: whether the panels hold the products. whole_rows: whether the operator needs whole
            rows.
        """
        rows, columns = block
        by_side = (self.ratios, self.zeros, (self.row_dots, self.column_dots))
        side_values = [
            _of_block(values, part)
            for sides in by_side
            for values, part in zip(sides, block, strict=True)
        ]
        if gradients is None:
            side_values[4:] = None, None
        operands = [], []
        if self.columns is None:
            sides = zip((self.x, self.y), block, strict=True)
            operands = [[width_rows[part] for width_rows in side.rows] for side, part in sides]
        elif not filled:
            self._fill(block)
        is_first = rows.start == 0, columns.start == 0
        gradients = gradients or ([], [])
        sides = *side_values, *operands, *gradients, *is_first
        return Operators("sweep", *sides, filled, whole_rows)


class _ScoreGradContext:
    """A context with the operators of a block.

    The products with the score gradients are added to the `Products` of all widths.
    """

    def __init__(self, sweep, block, products, **options):
        self.sweep, self.block, self.products, self.options = sweep, block, products, options
        self.copies = []

    def __enter__(self):
        sweep, (rows, columns) = self.sweep, self.block
        needs_grad = self.products[0].needs_grad
        gradients = [], []
        if sweep.columns is None:
            if needs_grad[0]:
                gradients[0].extend(product.grad_x[rows] for product in self.products)
            if needs_grad[1]:
                gradients[1].extend(product.grad_y[columns] for product in self.products)
            # A gradient must not overwrite rows that later parts of the block still read.
            in_parts = not self.options.get("whole_rows")
            if needs_grad[0] and in_parts and self.products[0].grad_x is self.products[0].unit_x:
                self.copies = list(gradients[0])
                gradients[0][:] = [torch.empty_like(grad) for grad in self.copies]
        self.gradients = gradients
        return sweep._operators(self.block, gradients, **self.options)

    def __exit__(self, failed, *_):
        if failed:
            return
        for target, grad in zip(self.copies, self.gradients[0], strict=False):
            target.copy_(grad)
        if self.sweep.columns is not None:
            panels = self.sweep._panels(self.block)
            for product, panel in zip(self.products, panels, strict=True):
                product.add(panel, self.block)


def _by_width(state):
    """The states of the widths, from one state of all of them."""
    return [list(parts) for parts in zip(*state.result(), strict=True)]

"""The panels of a sweep over prefixes on a CPU (the terms: fastsim/engine/sweep.py)."""

import torch

from fastsim.backends.cpu import amx, blas, memory, sizes
from fastsim.backends.cpu.both_ways import BothWays, common_top
from fastsim.backends.cpu.passes import (
    in_type,
    pair_arguments,
    state_of,
    sweep_of,
    write_score_grad,
)
from fastsim.backends.cpu.workspace import ODD, Columns
from fastsim.backends.panel import blocks_within

# Kinds each of whose steps on the rows of panels is one operator.
SWEPT = ("softmax", "sigmoid", "squared_error")


class _Steps:
    """The operators on a block of all widths (csrc/cpu/sweep.cpp), `given` what each is given."""

    def __init__(self, given):
        self._given = given

    def __getattr__(self, name):
        operator = getattr(torch.ops.fastsim_cpu, f"sweep_{name}")
        return lambda panels, *rest: operator(panels, *self._given, *rest)


def _of_block(values, part):
    return None if values is None else values[:, part]


class CpuSweep:
    """What `Backend.sweep` returns. A panel for each width, first of the products of its own
    columns, which become scores and their gradients row by row, of all widths.

    An operator makes the products before and after it too, a part of a block at a time; on a
    processor's matrix unit, and by a BLAS library, they are operators of their own. Panels are kept
    where score gradients need the whole row first, and, of the first rows, where they need the
    whole matrix: with `keep`.
    """

    def __init__(self, tile, x, y, *, whole_rows, keep):
        self.tile, self.x, self.y = tile, x, y
        self.widths = len(x.rows)
        self.dtype = torch.promote_types(y.rows[0].dtype, torch.float32)
        self.columns = None
        by_amx = amx.parts_of(y.rows[0])
        if by_amx and isinstance(y.rows[0], amx.ScaledRows):
            amx.keep_first(y.rows)
        if by_amx or blas.serves(y.rows[0]):
            self.columns = [Columns(columns, again=True) for columns in y.rows]
        top = common_top(tile)
        self.both = None if top is None else BothWays(tile, len(x), len(y), self.widths, top)
        # Whether the scores of a block are in memory before anything becomes of them.
        softmax = tile.kind == "softmax"
        self.whole = self.columns is not None or (softmax and self.both is None and not whole_rows)
        panels = sizes.SWEEP if self.columns is not None or softmax else 1
        self.shape = tall, wide = sizes.block_shape(len(x), len(y), whole_rows, panels=panels)
        # Rows of a block that have panels, and whether they are those that were kept.
        self.rows, self.kept = tall if self.whole else 0, False
        if self.both is not None and not self.whole:
            self.shape = max(1, len(x)), wide  # each block packs the columns again
            if keep and wide == len(y):
                most = sizes.KEPT_IN_SWEEP // self.widths
                self.rows = sizes.rows_kept(len(x), (sizes.TILE_ROWS, wide), most)
        shape = (self.widths, self.rows, wide + ODD) if self.rows else (self.widths, 0, 0)
        self.panels = memory.empty(shape, self.dtype)
        self.ratios = [torch.stack(side.ratios) if side.ratios else None for side in (x, y)]
        zeros = [torch.stack(side.zeros) if side.zeros else None for side in (x, y)]
        some = any(of_side is not None and of_side.any() for of_side in zeros)
        self.zeros = zeros if some else (None, None)
        self.row_dots, self.column_dots = (state_of(self.widths - 1, len(side)) for side in (x, y))

    def blocks(self):
        return blocks_within(len(self.x), len(self.y), *self.shape)

    def forward(self):
        state = self.both or sweep_of(self.tile, len(self.x), len(self.y), self.widths, None)
        for block in self.blocks():
            state.library = self._steps(block)
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
        with _Multiplied(self, block, products, whole_rows=whole_rows) as state.library:
            state.fused_pass(panels, pairs, weights)
        return _by_width(state)

    def coefficients(self, states, weights):
        if self.both is not None:
            return self.both.coefficients(states, weights, self.dtype)
        of_widths = zip(
            *(
                in_type(self.dtype, self.tile.coefficients(state, of_width.double()))
                for state, of_width in zip(states, weights, strict=True)
            ),
            strict=True,
        )
        return [None if parts[0] is None else torch.stack(parts) for parts in of_widths]

    def score_grad(self, block, coefficients, products):
        pairs, panels = self._pairs(block), self._panels(block)
        with _Multiplied(self, block, products, filled=self.kept) as steps:
            if self.both is not None:
                self.both.library = steps
                self.both.score_grad(panels, pairs, block, coefficients)
            else:
                write_score_grad(self.tile, panels, pairs, block, coefficients, steps)

    def _panels(self, block):
        """Those of a block, or of the rows of it that have any."""
        rows, columns = block
        tall = rows.stop - rows.start if self.whole else self.rows
        return self.panels[:, :tall, : columns.stop - columns.start]

    def _pairs(self, block):
        return pair_arguments(self.tile.pairs, block)

    def _fill(self, block):
        rows, columns = block
        for of_width, panel, own in zip(
            self.columns, self._panels(block), self.x.rows, strict=True
        ):
            of_width.fill(panel, own[rows], columns.start)

    def _steps(self, block, gradients=None, *, filled=False, whole_rows=False):
        """gradients: of the operands' rows and columns, as many as widths or none of either."""
        rows, columns = block
        of_sides = [
            _of_block(values, part)
            for both in (self.ratios, self.zeros, (self.row_dots, self.column_dots))
            for values, part in zip(both, block, strict=True)
        ]
        if gradients is None:
            of_sides[4:] = None, None
        operands = [], []
        if self.columns is None:
            sides = zip((self.x, self.y), block, strict=True)
            operands = [[of_width[part] for of_width in side.rows] for side, part in sides]
        elif not filled:
            self._fill(block)
        begins = rows.start == 0, columns.start == 0
        return _Steps([*of_sides, *operands, *(gradients or ([], [])), *begins, filled, whole_rows])


class _Multiplied:
    """The operators whose score gradients are added to the `Products` of all widths."""

    def __init__(self, sweep, block, products, **options):
        self.sweep, self.block, self.products, self.options = sweep, block, products, options
        self.copies = []

    def __enter__(self):
        sweep, (rows, columns) = self.sweep, self.block
        wants = self.products[0].wants
        gradients = [], []
        if sweep.columns is None:
            if wants[0]:
                gradients[0].extend(each.grad_x[rows] for each in self.products)
            if wants[1]:
                gradients[1].extend(each.grad_y[columns] for each in self.products)
            # The rows of a block are read to the last of its parts.
            parts = not self.options.get("whole_rows")
            if wants[0] and parts and self.products[0].grad_x is self.products[0].unit_x:
                self.copies = list(gradients[0])
                gradients[0][:] = [torch.empty_like(grad) for grad in self.copies]
        self.gradients = gradients
        return sweep._steps(self.block, gradients, **self.options)

    def __exit__(self, failed, *_):
        if failed:
            return
        for to, grad in zip(self.copies, self.gradients[0], strict=False):
            to.copy_(grad)
        if self.sweep.columns is not None:
            panels = self.sweep._panels(self.block)
            for product, panel in zip(self.products, panels, strict=True):
                product.add(panel, self.block)


def _by_width(state):
    """The states of the widths, of one of all of them."""
    return [list(parts) for parts in zip(*state.result(), strict=True)]

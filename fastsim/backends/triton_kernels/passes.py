"""The passes of the engine over the kernels: what is allocated, launched and merged."""

import torch

from fastsim.backends.triton_kernels import epilogues, pairs
from fastsim.backends.triton_kernels.arguments import (
    Block,
    ClosestPartials,
    LevelPartials,
    LevelSlope,
    LossPartials,
    Numbers,
    PairArguments,
    SoftmaxPartials,
    SoftmaxSlope,
    Weights,
)
from fastsim.backends.triton_kernels.launching import launch
from fastsim.backends.triton_kernels.merge import merge_exponentials_kernel
from fastsim.backends.triton_kernels.rows import unit_rows_backward_kernel, unit_rows_kernel
from fastsim.backends.triton_kernels.table import LINE, architecture, block_sizes
from fastsim.backends.triton_kernels.tile import positives_kernel, tile_kernel

PARTIALS = 128 << 20  # bytes of partial results alive
LEFT_OUT = pairs.LEFT_OUT.value


# ---- rows ----


def unit_rows(x, dtype):
    """(unit rows, inverse norms); rows of operands (dtype None) are padded to whole lines."""
    rows, depth = x.shape
    operand = dtype or operand_dtype(x.dtype)
    step = LINE // operand.itemsize
    width = depth if dtype else cdiv(depth, step) * step
    unit = x.new_empty(rows, width, dtype=operand)
    inverse = x.new_empty(rows, dtype=torch.float32)
    band, chunk = _row_sizes(width)
    launch(
        unit_rows_kernel,
        (cdiv(rows, band),),
        x,
        *x.stride(),
        unit,
        inverse,
        rows,
        depth,
        width,
        TINY=torch.finfo(torch.float32).tiny,
        ROWS=band,
        BLOCK=chunk,
        num_warps=4,
    )
    return unit[:, :depth], inverse


def unit_rows_backward(grad_unit, x, inverse, factor):
    """(factor * dL/dx, unit . grad_unit)."""
    rows, depth = x.shape
    # The interpreter cuts float32 to bfloat16 instead of rounding it.
    written = torch.float32 if architecture(x.device) == "interpreter" else x.dtype
    grad, dots = x.new_empty(x.shape, dtype=written), torch.empty_like(inverse)
    band, chunk = _row_sizes(depth)
    launch(
        unit_rows_backward_kernel,
        (cdiv(rows, band),),
        grad_unit,
        x,
        *x.stride(),
        inverse,
        factor.to(inverse.dtype),
        grad,
        dots,
        rows,
        depth,
        ROWS=band,
        BLOCK=chunk,
        num_warps=4,
    )
    return grad.to(x.dtype), dots


def operand(unit, dtype):
    """Unit rows of the compute type as operands for inputs of `dtype`, padded to whole lines."""
    rows, depth = unit.shape
    kind = operand_dtype(dtype)
    step = LINE // kind.itemsize
    padded = unit.new_zeros(rows, cdiv(depth, step) * step, dtype=kind)
    padded[:, :depth] = unit
    return padded[:, :depth]


def operand_dtype(dtype):
    """float16 for 16-bit inputs: unit rows never overflow, and bfloat16 would be less exact."""
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def cdiv(a, b):
    """a / b rounded up."""
    return -(-a // b)


def _row_sizes(width):
    chunk = min(1024, 1 << (width - 1).bit_length())
    return max(1, 2048 // chunk), chunk


# ---- tiles ----


class Launch:
    """The launches of one loss over one pair of unit rows; `heavy`: of much work per score."""

    def __init__(self, pairs, numbers, unit_x, unit_y, *, heavy=False):
        self.unit_x, self.unit_y = unit_x, unit_y
        self.pairs, self.numbers, self.skip = pair_arguments(pairs), numbers, pairs.skip
        self.stride = unit_x.stride(0)
        self.sizes = block_sizes(architecture(unit_x.device), unit_x.dtype.itemsize, self.stride)
        self.parts = self.sizes.parts * (2 if heavy else 1)
        full = torch.get_float32_matmul_precision() == "highest"
        self.precision = "ieee" if full else "tf32"

    def grid(self, rows, columns):
        """(rows, columns) of tiles over the two slices."""
        return (
            cdiv(rows.stop - rows.start, self.sizes.rows),
            cdiv(columns.stop - columns.start, self.sizes.columns),
        )

    def tiles(self, rows, columns):
        """(rows, columns) of what the epilogues take for tiles."""
        tall, wide = self.grid(rows, columns)
        return tall, wide * self.parts

    def bands(self, per_tile):
        """Slices of rows whose tiles leave at most PARTIALS bytes, `per_tile` (row, column) each.

        per_tile: bytes that a tile leaves.
        """
        rows, columns = self.unit_x.shape[0], self.unit_y.shape[0]
        _, across = self.tiles(slice(0, rows), slice(0, columns))
        tall = max(1, PARTIALS // (across * per_tile)) * self.sizes.rows
        return [slice(top, min(rows, top + tall)) for top in range(0, rows, tall)]

    def __call__(
        self,
        rows,
        columns,
        *,
        fold=None,
        partials=None,
        slope=None,
        coefficients=None,
        panel=None,
    ):
        sizes = self.sizes
        tall, wide = self.grid(rows, columns)
        launch(
            tile_kernel,
            (tall * wide,),
            self.unit_x,
            self.unit_y,
            self.stride,
            Block(rows.start, rows.stop, columns.start, columns.stop),
            self.pairs,
            self.numbers,
            partials,
            coefficients,
            panel,
            None if panel is None else panel.stride(0),
            SKIP=self.skip,
            FOLD=fold,
            SLOPE=slope,
            PRECISION=self.precision,
            BLOCK_M=sizes.rows,
            BLOCK_N=sizes.columns,
            BLOCK_K=sizes.depth,
            GROUP=sizes.group,
            PARTS=self.parts,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )

    def positive_scores(self):
        """(N,) float32, by the same products as the tiles, so that a copy of a positive ties."""
        sizes, rows = self.sizes, self.unit_x.shape[0]
        out = self.unit_x.new_empty(rows, dtype=torch.float32)
        launch(
            positives_kernel,
            (cdiv(rows, sizes.rows),),
            self.unit_x,
            self.unit_y,
            self.stride,
            self.pairs.positives,
            out,
            rows,
            PRECISION=self.precision,
            BLOCK_M=sizes.rows,
            BLOCK_N=sizes.columns,
            BLOCK_K=sizes.depth,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )
        return out

    def merge(self, tops, sums, top, total, *, running):
        """Merges (tiles, n) maxima and sums of exponentials into (n,)."""
        tiles, count = tops.shape
        block = 64
        launch(
            merge_exponentials_kernel,
            (cdiv(count, block),),
            tops,
            sums,
            top,
            total,
            self.numbers.scale,
            tiles,
            count,
            RUNNING=running,
            TILES=16,
            BLOCK=block,
            num_warps=4,
        )


def pair_arguments(pairs):
    """`Pairs` as kernel arguments."""
    dense = pairs.dense
    if dense is not None and dense.dtype == torch.bool:
        dense = dense.view(torch.uint8)
    strides = (None, None) if dense is None else dense.stride()
    return PairArguments(
        pairs.positives,
        pairs.row_ids,
        pairs.column_ids,
        pairs.row_groups,
        pairs.column_groups,
        None if pairs.row_groups is None else float(pairs.otherwise),
        dense,
        *strides,
    )


def tile_launch(tile, unit_x, unit_y, *, slopes):
    """The launches of a tile loss."""
    numbers = Numbers(tile.scale, tile.bias, float(tile.margin) if tile.margin else None)
    heavy = slopes or tile.kind in ("sigmoid", "levels")
    return Launch(tile.pairs, numbers, unit_x, unit_y, heavy=heavy)


def fold(tile, unit_x, unit_y):
    """The state of the loss over the whole matrix."""
    run = tile_launch(tile, unit_x, unit_y, slopes=False)
    kept = _FOLDS[tile.kind](tile, run, unit_y.shape[0])
    for rows in run.bands(kept.per_tile):
        kept.add(run, rows)
    return kept.result()


def visit(tile, unit_x, unit_y, block, weights, panel):
    """The state of a block of whole rows, and its slopes in `panel`; `weights` of the block."""
    together = tile.kind != "softmax"  # whose slopes need the state of the whole row
    run = tile_launch(tile, unit_x, unit_y, slopes=together)
    kept = _FOLDS[tile.kind](tile, run, unit_y.shape[0])
    if together:
        kept.add(run, block[0], Weights(weights), panel)
        return kept.result()
    kept.add(run, block[0])
    state = kept.result()
    slope(tile, unit_x, unit_y, block, tile.coefficients(state, weights.double()), panel)
    return state


def slope(tile, unit_x, unit_y, block, coefficients, panel):
    """The slopes of a block in `panel` from the coefficients of its rows and columns."""
    run = tile_launch(tile, unit_x, unit_y, slopes=True)
    arguments = _SLOPES[tile.kind](tile, coefficients)
    run(*block, slope=_SLOPE_EPILOGUES[tile.kind], coefficients=arguments, panel=panel)


class _SoftmaxFold:
    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        self.matrix = tile.pairs.dense is not None or tile.pairs.row_groups is not None
        sizes, arrays = run.sizes, 4 if self.matrix else 2
        self.per_tile = 4 * (arrays * sizes.rows + 2 * tile.symmetric * sizes.columns // run.parts)
        self.rows = []
        self.column_state = None
        if tile.symmetric:
            self.column_state = [run.unit_x.new_empty(columns, dtype=torch.float32) for _ in "ts"]

    def add(self, run, rows):
        tall, wide = run.tiles(rows, self.columns)
        count, columns = rows.stop - rows.start, self.columns.stop

        def empty(*shape):
            return run.unit_x.new_empty(shape, dtype=torch.float32)

        partials = SoftmaxPartials(
            empty(wide, count),
            empty(wide, count),
            None if self.matrix else empty(count),
            *((empty(wide, count), empty(wide, count)) if self.matrix else (None, None)),
            *((empty(tall, columns), empty(tall, columns)) if self.tile.symmetric else (None,) * 2),
        )
        run(rows, self.columns, fold=epilogues.softmax_fold, partials=partials)
        top, total = empty(count), empty(count)
        run.merge(partials.row_top, partials.row_sum, top, total, running=False)
        state = [top.double(), total.double()]
        if self.matrix:
            state.append(partials.target_scores.sum(0, dtype=torch.float64) * self.tile.scale)
            state.append(partials.target_sums.sum(0, dtype=torch.float64))
        else:
            state.append(partials.positive.double() * self.tile.scale)
            state.append(torch.ones_like(state[0]))
        self.rows.append(state)
        if self.tile.symmetric:
            running = rows.start > 0
            run.merge(partials.column_top, partials.column_sum, *self.column_state, running=running)

    def result(self):
        state = joined(self.rows)
        if self.tile.symmetric:
            state += [part.double() for part in self.column_state]
        return state


class _LossFold:
    """Losses that are sums over the row: `parts` of them."""

    def __init__(self, tile, run, columns, *, epilogue, slope, parts):
        self.columns, self.parts = slice(0, columns), parts
        self.epilogue, self.slope = epilogue, slope
        self.per_tile = 4 * parts * run.sizes.rows
        self.rows = []

    def add(self, run, rows, weights=None, panel=None):
        shape = run.tiles(rows, self.columns)[1], rows.stop - rows.start
        sums = [run.unit_x.new_empty(shape, dtype=torch.float32) for _ in range(self.parts)]
        run(
            rows,
            self.columns,
            fold=self.epilogue,
            partials=LossPartials(*sums),
            slope=None if panel is None else self.slope,
            coefficients=weights,
            panel=panel,
        )
        self.rows.append([part.sum(0, dtype=torch.float64) for part in sums])

    def result(self):
        return joined(self.rows)


def _sigmoid_fold(tile, run, columns):
    return _LossFold(
        tile,
        run,
        columns,
        epilogue=epilogues.sigmoid_fold,
        slope=epilogues.sigmoid_slope,
        parts=2,
    )


def _squared_error_fold(tile, run, columns):
    return _LossFold(
        tile,
        run,
        columns,
        epilogue=epilogues.squared_error_fold,
        slope=epilogues.squared_error_slope,
        parts=1,
    )


class _LevelsFold:
    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        count = tile.levels.numel()
        self.per_tile = 16 * count
        self.top = tile.levels.new_full((2, count), LEFT_OUT, dtype=torch.float64)
        self.sum = torch.zeros_like(self.top)

    def add(self, run, rows):
        tall, wide = run.tiles(rows, self.columns)
        levels, scale = self.tile.levels, self.tile.scale
        out = levels.new_empty((tall * wide, 2, 2, levels.numel()), dtype=torch.float32)
        partials = LevelPartials(out, levels, levels.numel())
        run(rows, self.columns, fold=epilogues.levels_fold, partials=partials)
        tops, sums = out.double().unbind(2)
        top = torch.maximum(self.top, tops.amax(0))
        grown = (sums * (scale * (tops - top)).exp()).sum(0)
        self.sum = self.sum * (scale * (self.top - top)).exp() + grown
        self.top = top

    def result(self):
        return [self.top, self.sum]


def joined(parts):
    """Lists of tensors, one list per band of rows -> one list."""
    return parts[0] if len(parts) == 1 else list(map(torch.cat, zip(*parts, strict=True)))


def _softmax_slope(tile, coefficients):
    return SoftmaxSlope(*(None if c is None else c.float() for c in coefficients))


def _weights(tile, coefficients):
    return Weights(coefficients[0].float())


def _level_slope(tile, coefficients):
    return LevelSlope(*(c.float() for c in coefficients), tile.levels, tile.levels.numel())


def of_block(tile, coefficients, block):
    """The coefficients of the rows and columns of a block."""
    if tile.kind == "levels":
        return coefficients
    rows, columns = block
    of_rows = [c[rows] for c in coefficients[:3]]
    return of_rows + [None if c is None else c[columns] for c in coefficients[3:]]


_FOLDS = {
    "softmax": _SoftmaxFold,
    "sigmoid": _sigmoid_fold,
    "squared_error": _squared_error_fold,
    "levels": _LevelsFold,
}
_SLOPES = {
    "softmax": _softmax_slope,
    "sigmoid": _weights,
    "squared_error": _weights,
    "levels": _level_slope,
}
_SLOPE_EPILOGUES = {
    "softmax": epilogues.softmax_slope,
    "sigmoid": epilogues.sigmoid_slope,
    "squared_error": epilogues.squared_error_slope,
    "levels": epilogues.levels_slope,
}


# ---- selection ----


def closest(pairs, semi_hard, unit_x, unit_y):
    """Column (N,) of each row's closest negative, -1 where it has none."""
    run = Launch(pairs, Numbers(), unit_x, unit_y)
    columns = slice(0, unit_y.shape[0])
    ceiling = run.positive_scores() if semi_hard else None
    found = []
    for band in run.bands(8 * run.sizes.rows):
        shape = run.tiles(band, columns)[1], band.stop - band.start
        top = unit_x.new_empty(shape, dtype=torch.float32)
        column = unit_x.new_empty(shape, dtype=torch.int32)
        partials = ClosestPartials(top, column, None if ceiling is None else ceiling[band])
        run(band, columns, fold=epilogues.closest_fold, partials=partials)
        best = top.amax(0)
        first = torch.where(top == best, column, torch.iinfo(torch.int32).max).amin(0)
        found.append(torch.where(best > LEFT_OUT, first, -1).long())
    return torch.cat(found)

"""The launches of one loss over the unit rows of x and y, and the memory for their results."""

from typing import NamedTuple

import torch

from fastsim.backends.half_rows import scored
from fastsim.backends.triton.kernels.kept import kept_score_grads_kernel
from fastsim.backends.triton.kernels.launching import cdiv, launch
from fastsim.backends.triton.kernels.merge import merge_exponentials_kernel
from fastsim.backends.triton.kernels.operands import tile_descriptor
from fastsim.backends.triton.kernels.positives import positives_kernel
from fastsim.backends.triton.kernels.table import (
    PANEL_LINE,
    architecture,
    block_sizes,
    kept_sizes,
    operand_kind,
)
from fastsim.backends.triton.kernels.tile import tile_kernel

PARTIALS = 128 << 20  # bytes of partial results alive
MOST_PARTS = 8  # parts of a tile, at most
SCORE_GRAD_ROWS = 32  # rows of a program that turns kept scores into score gradients


class EpilogueInputs(NamedTuple):
    """The inputs of an epilogue beside the scores of a block of n rows and m columns.

    row_coefficients, column_coefficients: (K, n) and (K, m) coefficients.
    levels: (K,) the target values of CoSENT over a matrix.
    level_numbers: (4, K) coefficients of the levels, or (tiles, 4, K) memory for partial results.
    """

    row_coefficients: torch.Tensor | None = None
    column_coefficients: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    level_numbers: torch.Tensor | None = None

    @property
    def arguments(self):
        """The inputs in the order of the kernels."""
        count = 0 if self.levels is None else self.levels.numel()
        return (
            self.levels,
            count,
            self.level_numbers,
            self.row_coefficients,
            self.column_coefficients,
        )

    @property
    def counts(self):
        """The numbers of coefficients, as constants of the kernels."""
        rows, columns = (
            0 if c is None else len(c) for c in (self.row_coefficients, self.column_coefficients)
        )
        return {"ROWS_IN": rows, "COLUMNS_IN": columns}


NO_INPUTS = EpilogueInputs()


class Launch:
    """The launches of one loss over the unit rows of x and y.

    heavy: how often the width of a tile's parts is halved, for epilogues with more work on a score.
    keep: whether the caller wants to keep scores for the score gradients (kept.py).
    keeps: whether scores are kept. Only cosines are kept, and only where that is faster.
    mirrored: whether a forward pass takes only the tiles on and above the diagonal, and reduces
        the tiles above it by row and by column. Then x has to be compared with itself, and the loss
        has to have no state of columns.
    """

    mirrored = False

    def __init__(self, pairs, unit_x, unit_y, *, tile=None, heavy=0, keep=False):
        self.self_similarity = unit_x is unit_y
        (self.unit_x, x_rest), (self.unit_y, y_rest) = map(scored, (unit_x, unit_y))
        self.device, self.rests = unit_x.device, (x_rest, y_rest)
        self.pairs, self.skip = pair_arguments(pairs), pairs.skip
        self.negative = float(pairs.negative_target)
        self.numbers = (None, None, None, None)
        if tile is not None:
            parameters, positive_scale = tile.record.parameters, None
            if "positive_scale" in parameters:
                positive_scale = torch.full_like(tile.scale, tile.positive_scale)
            scale, bias = (getattr(tile, n) if n in parameters else None for n in ("scale", "bias"))
            self.numbers = (scale, bias, float(tile.margin) or None, positive_scale)
        key, self.precision = _product_key(self.unit_x)
        sizes = block_sizes(*key)
        keep = keep and tile.cosine
        sizes_to_keep = kept_sizes(*key) if keep else sizes
        self.avoids_products = self.unit_x.stride(0) >= sizes.break_even
        half = self.unit_x.dtype.itemsize == 2
        self.keeps = keep and half and self.unit_x.stride(0) >= sizes_to_keep.break_even
        self.guide = (pairs.thresholds, None, None, 0)
        self.guide_precision = guide_depth = None
        if pairs.guide is not None:
            rows, columns = pairs.guide.rows, pairs.guide.columns
            # The guide's rows may have another type than x. Its thresholds come from products of
            # that type.
            guide_key, self.guide_precision = _product_key(rows)
            guide_depth = block_sizes(*guide_key).depth
            self.guide = (pairs.guide.thresholds, rows, columns, _steps(rows, guide_depth))
            # The product of the guide needs an accumulator too.
            sizes = sizes._replace(columns=sizes.columns // 2, width=sizes.width // 2)
        # With dense targets each score needs registers for the address of its target, with levels
        # for the numbers of its level.
        if pairs.dense is not None or (tile is not None and tile.levels is not None):
            sizes = sizes.with_more_warps()
        elif self.keeps and pairs.guide is None:
            sizes = sizes_to_keep
        self.sizes, self.steps = sizes, _steps(self.unit_x, sizes.depth)
        self.guide_sizes = None if guide_depth is None else sizes._replace(depth=guide_depth)
        self.width = max(sizes.width >> heavy, sizes.columns // MOST_PARTS)

    def grid(self, rows, columns):
        """(rows, columns) of tiles of the block of two slices."""
        return (
            cdiv(rows.stop - rows.start, self.sizes.rows),
            cdiv(columns.stop - columns.start, self.sizes.columns),
        )

    def tiles(self, rows, columns):
        """(rows, columns) of tiles of the block, where each part of a tile counts as a tile."""
        tile_rows, tile_columns = self.grid(rows, columns)
        return tile_rows, tile_columns * (self.sizes.columns // self.width)

    def mirror(self, per_tile):
        """Sets `mirrored` if x is compared with itself and half the tiles are faster; returns it.

        per_tile: bytes of partial results of a tile. All rows are one band then, so the partial
            results of tiles and of transposed tiles have to fit into PARTIALS together.
        """
        all_rows = slice(0, self.unit_x.shape[0])
        tile_rows, tile_columns = self.tiles(all_rows, all_rows)
        partials = tile_rows * (tile_rows + tile_columns) * per_tile
        symmetric = self.self_similarity and self.skip != "lower" and self.guide[0] is None
        self.mirrored = symmetric and self.avoids_products and partials <= PARTIALS
        if self.mirrored:
            self.sizes = self.sizes.with_more_warps()
        return self.mirrored

    def row_partials(self, rows, columns, *fills):
        """Memory for partial results by row: a plane (tiles, n) float32 for each of `fills`.

        fills: the values with which planes begin if tiles are mirrored, as some then write nothing.
        """
        tile_rows, tile_columns = self.tiles(rows, columns)
        tiles = tile_columns + tile_rows * self.mirrored
        shape = len(fills), tiles, rows.stop - rows.start
        partials = self.unit_x.new_empty(shape, dtype=torch.float32)
        if self.mirrored:
            for plane, fill in zip(partials, fills, strict=True):
                plane.fill_(fill)
        return partials

    def bands(self, per_tile):
        """Slices of rows. The tiles of each have at most PARTIALS bytes of partial results.

        per_tile: bytes of partial results of a tile.
        """
        rows, columns = self.unit_x.shape[0], self.unit_y.shape[0]
        if self.mirrored:
            return [slice(0, rows)]
        _, tile_columns = self.tiles(slice(0, rows), slice(0, columns))
        height = max(1, PARTIALS // (tile_columns * per_tile)) * self.sizes.rows
        return [slice(top, min(rows, top + height)) for top in range(0, rows, height)]

    def __call__(
        self,
        rows,
        columns,
        epilogue,
        *,
        inputs=NO_INPUTS,
        row_out=None,
        column_out=None,
        positive_out=None,
        panel=None,
        ranges=None,
    ):
        """Launches the tile kernel over a block. tile.py describes its arguments."""
        # The codes of kept scores need more registers too.
        sizes = self.sizes if ranges is None else self.sizes.with_more_warps()
        operands = self.unit_x, self.unit_y
        if sizes.descriptors:
            tiles = (sizes.rows, sizes.columns)
            operands = (
                tile_descriptor(u, t, sizes.depth) for u, t in zip(operands, tiles, strict=True)
            )
        tile_rows, tile_columns = self.grid(rows, columns)
        launch(
            tile_kernel,
            (tile_rows * tile_columns,),
            self.device,
            *operands,
            self.steps,
            *self.rests,
            *(rows.start, rows.stop, columns.start, columns.stop),
            *self.pairs,
            *self.guide,
            *self.numbers,
            *inputs.arguments,
            row_out,
            column_out,
            positive_out,
            panel if ranges is None else panel.view(torch.int16),
            0 if panel is None else panel.stride(0) // PANEL_LINE,
            ranges,
            EPILOGUE=epilogue,
            SKIP=self.skip,
            NEGATIVE=self.negative,
            **inputs.counts,
            ROWS_OUT=0 if row_out is None else len(row_out),
            COLUMNS_OUT=0 if column_out is None else len(column_out),
            MIRRORED=self.mirrored,
            PRECISION=self.precision,
            GUIDE_PRECISION=self.guide_precision,
            WIDTH=self.width,
            SIZES=sizes,
            GUIDE_SIZES=self.guide_sizes,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )

    def ranges(self, rows, columns):
        """Memory for the maxima and steps with which the scores of a block are kept (kept.py)."""
        shape = 2, self.tiles(rows, columns)[1], rows.stop - rows.start
        return self.unit_x.new_empty(shape, dtype=torch.float32)

    def kept_score_grads(self, rows, columns, epilogue, *, inputs, panel, ranges):
        """Writes score gradients from the scores that a forward pass over the block has kept."""
        launch(
            kept_score_grads_kernel,
            (cdiv(rows.stop - rows.start, SCORE_GRAD_ROWS) * self.tiles(rows, columns)[1],),
            self.device,
            *self.rests,
            *(rows.start, rows.stop, columns.start, columns.stop),
            *self.pairs,
            *self.numbers,
            *inputs.arguments,
            panel,
            panel.stride(0) // PANEL_LINE,
            ranges,
            EPILOGUE=epilogue,
            NEGATIVE=self.negative,
            **inputs.counts,
            ROWS=SCORE_GRAD_ROWS,
            WIDTH=self.width,
            COLUMNS=self.sizes.columns,
            num_warps=4,
        )

    def positive_scores(self):
        """The score (N,) float32 of each row's positive.

        It is computed by the same products as the tiles, so that a copy of a positive has the same
        score.
        """
        sizes, rows = self.sizes, self.unit_x.shape[0]
        # A tile has to contain its diagonal, so it has at least as many columns as rows.
        sizes = sizes._replace(rows=min(sizes.rows, sizes.columns))
        out = self.unit_x.new_empty(rows, dtype=torch.float32)
        launch(
            positives_kernel,
            (cdiv(rows, sizes.rows),),
            self.device,
            self.unit_x,
            self.unit_y,
            self.steps,
            *self.rests,
            self.pairs[0],
            out,
            rows,
            PRECISION=self.precision,
            SIZES=sizes,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )
        return out

    def merge(self, tops, sums, top, total, *, accumulate=False, positives=False):
        """Merges maxima `tops` and sums of exponentials `sums` (tiles, n) into top and total (n,).

        accumulate: whether top and total already hold a state, which is merged too.
        positives: whether the scale is `positive_scale`.
        """
        tiles, count = tops.shape
        block = 64
        launch(
            merge_exponentials_kernel,
            (cdiv(count, block),),
            self.device,
            tops,
            sums,
            top,
            total,
            self.numbers[3 if positives else 0],
            tiles,
            count,
            ACCUMULATE=accumulate,
            TILES=16,
            BLOCK=block,
            num_warps=4,
        )


def _product_key(rows):
    """(the arguments of `block_sizes` for products of these unit rows, their Triton precision)."""
    arch = architecture(rows.device)
    kind = operand_kind(rows.dtype, arch)
    return (arch, kind, rows.stride(0)), "tf32" if kind == "tf32" else "ieee"


def _steps(rows, depth):
    """The number of steps of `depth` in a product of unit rows, which are padded to whole steps."""
    steps, rest = divmod(rows.stride(0), depth)
    assert rest == 0
    return steps


def pair_arguments(pairs):
    """The arguments of kernels for `Pairs`: index tensors, dense targets, their strides, offset."""
    dense = pairs.dense
    strides = (0, 0) if dense is None else dense.stride()
    indices = pairs.tensors()[:-1]
    return *indices, dense, *strides, 0 if pairs.skip == "nothing" else pairs.offset

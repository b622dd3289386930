"""The launches of one loss over the unit rows of x and y, and the memory for their results."""

from typing import NamedTuple

import torch

from fastsim.backends.half_rows import scored
from fastsim.backends.triton.kernels.kept import kept_score_grads_kernel
from fastsim.backends.triton.kernels.launching import cdiv, launch
from fastsim.backends.triton.kernels.merge import merge_exponentials_kernel
from fastsim.backends.triton.kernels.operands import described
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
PARTS = 8  # of a tile, at most
KEPT_ROWS = 32  # of a program that turns kept scores into score gradients


class EpilogueInputs(NamedTuple):
    """The inputs of an epilogue beside the scores of a block of n rows and m columns.

    of_rows, of_columns: (K, n) and (K, m) coefficients.
    levels: (K,) the target values of CoSENT over a matrix.
    of_levels: (4, K) coefficients of the levels, or (tiles, 4, K) memory for partial results.
    """

    of_rows: torch.Tensor | None = None
    of_columns: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    of_levels: torch.Tensor | None = None

    @property
    def arguments(self):
        """The inputs in the order of the kernels."""
        count = 0 if self.levels is None else self.levels.numel()
        return self.levels, count, self.of_levels, self.of_rows, self.of_columns

    @property
    def counts(self):
        """The numbers of coefficients, as constants of the kernels."""
        rows, columns = (0 if c is None else len(c) for c in (self.of_rows, self.of_columns))
        return {"ROWS_IN": rows, "COLUMNS_IN": columns}


NO_INPUTS = EpilogueInputs()


class Launch:
    """The launches of one loss over the unit rows of x and y.

    heavy: how often the width of a tile's parts is halved, for epilogues with more work on a score.
    keep: whether the caller wants to keep scores for the score gradients (kept.py).
    keeps: whether they are kept. Only cosines are, and only where that is faster.
    mirrored: whether a forward pass takes only the tiles on and above the diagonal, and reduces
        those above it by row and by column. Then x has to be compared with itself, and the loss
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
            taken, positive_scale = tile.record.parameters, None
            if "positive_scale" in taken:
                positive_scale = torch.full_like(tile.scale, tile.positive_scale)
            scale, bias = (getattr(tile, n) if n in taken else None for n in ("scale", "bias"))
            self.numbers = (scale, bias, float(tile.margin) or None, positive_scale)
        place, self.precision = _product_of(self.unit_x)
        sizes = block_sizes(*place)
        keep = keep and tile.cosine
        kept = kept_sizes(*place) if keep else sizes
        self.spares = self.unit_x.stride(0) >= sizes.spare
        half = self.unit_x.dtype.itemsize == 2
        self.keeps = keep and half and self.unit_x.stride(0) >= kept.spare
        self.guide = (pairs.thresholds, None, None, 0)
        self.guide_precision = guide_depth = None
        if pairs.guide is not None:
            rows, columns = pairs.guide.rows, pairs.guide.columns
            # The guide's rows may have another type than x. Its thresholds come from products of
            # that type.
            guide_place, self.guide_precision = _product_of(rows)
            guide_depth = block_sizes(*guide_place).depth
            self.guide = (pairs.guide.thresholds, rows, columns, _steps(rows, guide_depth))
            # The product of the guide needs an accumulator too.
            sizes = sizes._replace(columns=sizes.columns // 2, width=sizes.width // 2)
        # With dense targets each score needs registers for the address of its target, with levels
        # for the numbers of its level.
        if pairs.dense is not None or (tile is not None and tile.levels is not None):
            sizes = sizes.crowded()
        elif self.keeps and pairs.guide is None:
            sizes = kept
        self.sizes, self.steps = sizes, _steps(self.unit_x, sizes.depth)
        self.guide_sizes = None if guide_depth is None else sizes._replace(depth=guide_depth)
        self.width = max(sizes.width >> heavy, sizes.columns // PARTS)

    def grid(self, rows, columns):
        """(rows, columns) of tiles of the block of two slices."""
        return (
            cdiv(rows.stop - rows.start, self.sizes.rows),
            cdiv(columns.stop - columns.start, self.sizes.columns),
        )

    def tiles(self, rows, columns):
        """(rows, columns) of tiles of the block, where each part of a tile counts as a tile."""
        tall, wide = self.grid(rows, columns)
        return tall, wide * (self.sizes.columns // self.width)

    def mirror(self, per_tile):
        """Sets `mirrored` if x is compared with itself and half the tiles are faster; returns it.

        per_tile: bytes of partial results of a tile. All rows are one band then, so the partial
            results of tiles and of transposed tiles have to fit into PARTIALS together.
        """
        everything = slice(0, self.unit_x.shape[0])
        tall, wide = self.tiles(everything, everything)
        same = self.self_similarity and self.skip != "lower" and self.guide[0] is None
        self.mirrored = same and self.spares and tall * (tall + wide) * per_tile <= PARTIALS
        if self.mirrored:
            self.sizes = self.sizes.crowded()
        return self.mirrored

    def row_partials(self, rows, columns, *fills):
        """Memory for partial results by row: a plane (tiles, n) float32 for each of `fills`.

        fills: the values with which planes begin if tiles are mirrored, as some then write nothing.
        """
        tall, wide = self.tiles(rows, columns)
        shape = len(fills), wide + tall * self.mirrored, rows.stop - rows.start
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
        _, across = self.tiles(slice(0, rows), slice(0, columns))
        tall = max(1, PARTIALS // (across * per_tile)) * self.sizes.rows
        return [slice(top, min(rows, top + tall)) for top in range(0, rows, tall)]

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
        sizes = self.sizes if ranges is None else self.sizes.crowded()
        operands = self.unit_x, self.unit_y
        if sizes.descriptors:
            tiles = (sizes.rows, sizes.columns)
            operands = (described(u, t, sizes.depth) for u, t in zip(operands, tiles, strict=True))
        tall, wide = self.grid(rows, columns)
        launch(
            tile_kernel,
            (tall * wide,),
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
            (cdiv(rows.stop - rows.start, KEPT_ROWS) * self.tiles(rows, columns)[1],),
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
            ROWS=KEPT_ROWS,
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

    def merge(self, tops, sums, top, total, *, running=False, positives=False):
        """Merges maxima `tops` and sums of exponentials `sums` (tiles, n) into top and total (n,).

        running: whether top and total already hold a state, which is merged too.
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
            RUNNING=running,
            TILES=16,
            BLOCK=block,
            num_warps=4,
        )


def _product_of(rows):
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

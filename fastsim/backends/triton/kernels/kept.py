"""Scores kept in 16 bits between a forward pass and the score gradients, so that the product
is done once.

A row of a part of a tile keeps its maximum and a step, and each score as a whole number of steps
below that maximum; one number stands for a pair that takes no part, so nothing is decided twice.
The maximum itself comes back exactly, so a row of one candidate has score gradient exactly 0. The
others are off by at most range / 2^17: 2^-16 where cosines go from -1 to 1, and a tenth of that for
the few tenths that the scores of a row usually span. At a scale of 100 that moves an exponential by
2e-4, less than float16 rounds a score gradient by. Dot products, whose range has no bound, are not
kept. An exponential in float16, the other thing that 16 bits could hold, serves rows only: what is
nothing to its row may be all that a column has.

What it costs and saves, per score: 2 bytes written by the forward pass and 2 read back by the
score gradient pass, and either way 8 bytes of maximum and step for each part of a row (32 scores),
4.5 bytes in all; the codes lie where the score gradients will. Against that stand 2 D FLOP. On an
H200 (4.3 TB/s, 790 TFLOP/s of the library) that is 1.05 ps against 1.9 ps at D = 768, and even at
D = 410, sooner where a tile product does not reach the library's rate: table.py says from which
depth on.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import LEFT_OUT, own_pairs, targets
from fastsim.backends.triton.kernels.places import (
    COUNTS,
    LINE,
    VECTORS,
    coefficients,
    number,
    rests,
    store_score_grads,
)

STEPS = tl.constexpr(65534.0)
NO_PART = tl.constexpr(65535)
MIDDLE = tl.constexpr(32768)  # codes are stored less this, as signed integers


@triton.jit
def _place(row, local, in_rows, codes, stride):
    """Places and mask of the codes of rows and columns of the block; a row ends with a line."""
    at = row.to(tl.int64)[:, None] * stride + local[None, :]
    return codes + at, in_rows[:, None] & (local < stride)[None, :]


@triton.jit
def keep(scores, row, local, in_rows, codes, stride, ranges, plane):
    """Writes the codes of a tile of scores, and the maximum and step of its rows to `ranges`."""
    left_out = scores <= LEFT_OUT
    top = tl.max(scores, 1)
    present = tl.where(left_out, top[:, None], scores)
    step = (top - tl.min(present, 1)) / STEPS
    tl.store(ranges, top, mask=in_rows)
    tl.store(ranges + plane, step, mask=in_rows)
    per_step = tl.where(step > 0, 1.0 / tl.where(step > 0, step, 1.0), 0.0)
    # The integer below, of half a step more.
    steps = tl.minimum(tl.fma(top[:, None] - present, per_step[:, None], 0.5), STEPS).to(tl.int32)
    code = tl.where(left_out, NO_PART, steps) - MIDDLE
    place, inside = _place(row, local, in_rows, codes, stride)
    tl.store(place, code.to(tl.int16), mask=inside)


@triton.jit
def recall(row, local, in_rows, codes, stride, ranges, plane):
    """The scores of a tile again."""
    place, inside = _place(row, local, in_rows, codes, stride)
    code = tl.load(place, mask=inside, other=NO_PART - MIDDLE).to(tl.int32) + MIDDLE
    top = tl.load(ranges, mask=in_rows, other=0.0)
    step = tl.load(ranges + plane, mask=in_rows, other=0.0)
    scores = tl.fma(-code.to(tl.float32), step[:, None], top[:, None])
    return tl.where(code == NO_PART, LEFT_OUT, scores)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def kept_score_grads_kernel(
    x_rest,
    y_rest,
    row0,
    row1,
    column0,
    column1,
    positives,
    row_ids,
    column_ids,
    row_groups,
    column_groups,
    dense,
    dense_row,
    dense_column,
    offset,
    scale,
    bias,
    margin,
    positive_scale,
    levels,
    level_count,
    of_levels,
    of_rows,
    of_columns,
    panel,
    panel_lines,
    ranges,
    EPILOGUE: tl.constexpr,  # noqa: N803
    NEGATIVE: tl.constexpr,  # noqa: N803
    ROWS_IN: tl.constexpr,  # noqa: N803
    COLUMNS_IN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Score gradients in the place of kept scores, of tiles of COLUMNS in parts of WIDTH."""
    height, across = row1 - row0, column1 - column0
    tiles = tl.cdiv(across, COLUMNS) * (COLUMNS // WIDTH)
    tile_row, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    pairs = (
        positives,
        row_ids,
        column_ids,
        row_groups,
        column_groups,
        dense,
        dense_row,
        dense_column,
        offset,
    )
    row = row0 + tile_row * ROWS + tl.arange(0, ROWS)
    local = place * WIDTH + tl.arange(0, WIDTH)
    column = column0 + local
    row_at, column_at = tl.minimum(row, row1 - 1), tl.minimum(column, column1 - 1)
    row_plane = tiles.to(tl.int64) * height
    at = ranges + place.to(tl.int64) * height + row - row0
    codes = panel.to(tl.pointer_type(tl.int16), bitcast=True)
    scores = recall(row - row0, local, row < row1, codes, panel_lines * LINE, at, row_plane)
    whole = (tile_row * ROWS + ROWS <= height) & (place * WIDTH + WIDTH <= across)
    target = targets(row, column, row_at, column_at, whole, row1, column1, pairs, NEGATIVE)
    _, _, score_grads = EPILOGUE(
        scores,
        target,
        own_pairs(row_at, column, pairs),
        column,
        (number(scale), number(bias), margin, number(positive_scale)),
        coefficients(row_at - row0, of_rows, height, ROWS_IN, 1),
        coefficients(column_at - column0, of_columns, across, COLUMNS_IN, 0),
        (levels, level_count, of_levels),
        True,
    )
    # Every thread has its codes before another writes score gradients over them.
    tl.debug_barrier()
    score_grad = score_grads[0]
    if x_rest is not None:
        score_grad *= rests(x_rest, y_rest, row_at, column_at)
    store_score_grads(score_grad, row, local, row0, row1, panel, panel_lines)

"""Scores that the forward pass keeps in 16 bits for the score gradients, to compute them only once.

The forward pass writes a maximum and a step for each row of a part of a tile. Each score becomes a
code: the whole number of steps by which it is below the maximum. The code of a pair that is left
out is LEFT_OUT_CODE, so that the pass for score gradients need not find these pairs again.

The maximum itself is restored exactly, so that a row with one candidate has a score gradient of
exactly 0. Other scores are off by at most range / 2^17. That is 2^-16 if cosines go from -1 to 1,
and a tenth of it for the few tenths that the scores of a row usually span. At a scale of 100 such
an error changes an exponential by 2e-4, which is less than the rounding of a score gradient to
float16. Dot products are not kept, as their range has no bound. Exponentials in float16 would also
fit into 16 bits, but they would serve rows only: an exponential that is negligible in its row may
be the largest of its column.

For each score, the forward pass writes 2 bytes and the pass for score gradients reads 2 bytes. Each
pass also moves 8 bytes of maximum and step for each part of a row (32 scores). This costs 4.5 bytes
in all. The codes are in the memory of the score gradients. The saving is 2 D FLOP. On an H200
(4.3 TB/s, 790 TFLOP/s of the library) the cost is 1.05 ps and the saving is 1.9 ps at D = 768. They
are equal at D = 410, or at a smaller depth if a tile product is slower than the library. table.py
says from which depth on scores are kept.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.loads_and_stores import (
    COUNTS,
    LINE,
    VECTORS,
    load_coefficients,
    load_number,
    rest_factors,
    store_score_grads,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT, positive_pairs, targets

STEPS = tl.constexpr(65534.0)
LEFT_OUT_CODE = tl.constexpr(65535)
CODE_OFFSET = tl.constexpr(32768)  # subtracted from a code, which is stored as a signed integer


@triton.jit
def _code_pointers(row, local, in_rows, codes, stride):
    """(pointers, mask) of the codes of some rows and columns of the block.

    Each row of codes consists of whole lines.
    """
    index = row.to(tl.int64)[:, None] * stride + local[None, :]
    return codes + index, in_rows[:, None] & (local < stride)[None, :]


@triton.jit
def keep(scores, row, local, in_rows, codes, stride, ranges, plane):
    """Writes the codes of a tile of scores, and the maxima and steps of its rows to `ranges`."""
    left_out = scores <= LEFT_OUT
    top = tl.max(scores, 1)
    present = tl.where(left_out, top[:, None], scores)
    step = (top - tl.min(present, 1)) / STEPS
    tl.store(ranges, top, mask=in_rows)
    tl.store(ranges + plane, step, mask=in_rows)
    per_step = tl.where(step > 0, 1.0 / tl.where(step > 0, step, 1.0), 0.0)
    # The number of steps is rounded to the nearest: 0.5 is added, then the sum is truncated.
    steps = tl.minimum(tl.fma(top[:, None] - present, per_step[:, None], 0.5), STEPS).to(tl.int32)
    code = tl.where(left_out, LEFT_OUT_CODE, steps) - CODE_OFFSET
    pointers, inside = _code_pointers(row, local, in_rows, codes, stride)
    tl.store(pointers, code.to(tl.int16), mask=inside)


@triton.jit
def recall(row, local, in_rows, codes, stride, ranges, plane):
    """The scores of a tile, computed from their codes."""
    pointers, inside = _code_pointers(row, local, in_rows, codes, stride)
    code = tl.load(pointers, mask=inside, other=LEFT_OUT_CODE - CODE_OFFSET).to(tl.int32)
    code += CODE_OFFSET
    top = tl.load(ranges, mask=in_rows, other=0.0)
    step = tl.load(ranges + plane, mask=in_rows, other=0.0)
    scores = tl.fma(-code.to(tl.float32), step[:, None], top[:, None])
    return tl.where(code == LEFT_OUT_CODE, LEFT_OUT, scores)


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
    level_numbers,
    row_coefficients,
    column_coefficients,
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
    """Writes score gradients over kept scores.

    COLUMNS, WIDTH: the columns of a tile, and of a part of it, in the launch that kept the scores.
    """
    block_rows, block_columns = row1 - row0, column1 - column0
    tiles = tl.cdiv(block_columns, COLUMNS) * (COLUMNS // WIDTH)
    tile_row, part_index = tl.program_id(0) // tiles, tl.program_id(0) % tiles
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
    local = part_index * WIDTH + tl.arange(0, WIDTH)
    column = column0 + local
    clamped_row, clamped_column = tl.minimum(row, row1 - 1), tl.minimum(column, column1 - 1)
    row_plane = tiles.to(tl.int64) * block_rows
    range_pointers = ranges + part_index.to(tl.int64) * block_rows + row - row0
    codes = panel.to(tl.pointer_type(tl.int16), bitcast=True)
    scores = recall(
        row - row0, local, row < row1, codes, panel_lines * LINE, range_pointers, row_plane
    )
    whole = (tile_row * ROWS + ROWS <= block_rows) & (part_index * WIDTH + WIDTH <= block_columns)
    target = targets(
        row, column, clamped_row, clamped_column, whole, row1, column1, pairs, NEGATIVE
    )
    _, _, score_grads = EPILOGUE(
        scores,
        target,
        positive_pairs(clamped_row, column, pairs),
        column,
        (load_number(scale), load_number(bias), margin, load_number(positive_scale)),
        load_coefficients(clamped_row - row0, row_coefficients, block_rows, ROWS_IN, 1),
        load_coefficients(
            clamped_column - column0, column_coefficients, block_columns, COLUMNS_IN, 0
        ),
        (levels, level_count, level_numbers),
        True,
    )
    # Every thread reads its codes before another writes score gradients over them.
    tl.debug_barrier()
    score_grad = score_grads[0]
    if x_rest is not None:
        score_grad *= rest_factors(x_rest, y_rest, clamped_row, clamped_column)
    store_score_grads(score_grad, row, local, row0, row1, panel, panel_lines)

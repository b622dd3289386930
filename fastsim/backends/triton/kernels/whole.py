"""A small batch: losses and score gradients from the matrix of products.

A library product has written the products of all rows with all columns. A program reads the
products of a few rows once and writes the rows' losses and score gradients. Beside the arguments of
tile.py there are

losses: (N,) receives the losses, times the weight.
sums: (2, N) receives dL/dscale and dL/dbias of each row, times the weight. It may be None.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E, sum_exponentials
from fastsim.backends.triton.kernels.epilogues.whole import subtract_margin
from fastsim.backends.triton.kernels.loads_and_stores import number_or_default
from fastsim.backends.triton.kernels.pairs import LEFT_OUT, scores_and_targets
from fastsim.backends.triton.kernels.rows import rest_of

COUNTS = ["rows", "columns", "stride"]
VECTORS = ["positives", "row_ids", "column_ids", "row_groups", "column_groups"]


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def whole_kernel(
    products,
    inverse,
    panel,
    losses,
    sums,
    column_state,
    positives,
    row_ids,
    column_ids,
    row_groups,
    column_groups,
    scale,
    bias,
    margin,
    weight,
    rows,
    columns,
    stride,
    EPILOGUE: tl.constexpr,  # noqa: N803
    FLAG: tl.constexpr,  # noqa: N803
    SKIP: tl.constexpr,  # noqa: N803
    NEGATIVE: tl.constexpr,  # noqa: N803
    GAIN: tl.constexpr,  # noqa: N803
    SCALED: tl.constexpr,  # noqa: N803
    SELF_SIMILARITY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """The losses and score gradients of some rows.

    products: (N, M) float32.
    inverse: (N + M,) inverse norms of x and y, or (N,) with SELF_SIMILARITY.
    SELF_SIMILARITY: whether x is compared with itself.
    panel: (N, stride) receives GAIN times dL_i/dlogit_ij. It may be in the memory of the products,
        or None.
    column_state: (3, M) the results of `whole_columns_kernel`, or None.
    SCALED: whether the products are products of `ScaledRows`.
    EPILOGUE, FLAG: a function of epilogues/whole.py, and its FLAG.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    clamped_row, clamped_column = tl.minimum(row, rows - 1), tl.minimum(column, columns - 1)
    pairs = (positives, row_ids, column_ids, row_groups, column_groups, None, 0, 0, 0)
    scores, factor = _scores(
        products, inverse, clamped_row, clamped_column, rows, columns, SCALED, SELF_SIMILARITY
    )
    scores, target, is_positive = scores_and_targets(
        scores,
        row,
        column,
        clamped_row,
        clamped_column,
        False,
        rows,
        columns,
        pairs,
        SKIP,
        NEGATIVE,
    )
    numbers = (number_or_default(scale, 1.0), number_or_default(bias, 0.0), margin)
    column_values = ()
    if column_state is not None:
        top = tl.load(column_state + clamped_column)[None, :]
        total = tl.load(column_state + columns + clamped_column)[None, :]
        column_values = (top, total, tl.load(column_state + 2 * columns + clamped_column)[None, :])
    loss, grads = EPILOGUE(scores, target, is_positive, column, numbers, column_values, FLAG)
    weight = number_or_default(weight, 1.0)
    tl.store(losses + row, (weight * loss).to(tl.float64), mask=row < rows)
    if sums is not None:
        # A pair that is left out has the gradient 0, and no score to multiply it by.
        scale_grad = weight * tl.sum(
            tl.where(grads == 0.0, 0.0, grads * subtract_margin(scores, is_positive, margin)), 1
        )
        tl.store(sums + row, scale_grad.to(tl.float64), mask=row < rows)
        bias_grad = weight * tl.sum(grads, 1)
        tl.store(sums + rows + row, bias_grad.to(tl.float64), mask=row < rows)
    if panel is not None:
        # Every thread reads its products before another writes score gradients over them.
        tl.debug_barrier()
        at = row.to(tl.int64)[:, None] * stride + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        out = (GAIN * grads) * factor
        tl.store(panel + at, out.to(panel.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS[:2], do_not_specialize_on_alignment=VECTORS[:3])
def whole_columns_kernel(
    products,
    inverse,
    column_state,
    positives,
    row_ids,
    column_ids,
    scale,
    margin,
    rows,
    columns,
    SCALED: tl.constexpr,  # noqa: N803
    SELF_SIMILARITY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Writes the state of each column.

    column_state: (3, M) receives the maximum of each column, its sum of exponentials, and the
        number of rows whose positive it is.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    clamped_column = tl.minimum(column, columns - 1)
    pairs = (positives, row_ids, column_ids, None, None, None, 0, 0, 0)
    number = number_or_default(scale, 1.0)
    top = tl.full((COLUMNS,), LEFT_OUT, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    count = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        clamped_row = tl.minimum(row, rows - 1)
        scores, _ = _scores(
            products, inverse, clamped_row, clamped_column, rows, columns, SCALED, SELF_SIMILARITY
        )
        scores, _, is_positive = scores_and_targets(
            scores,
            row,
            column,
            clamped_row,
            clamped_column,
            False,
            rows,
            columns,
            pairs,
            "nothing",
            0.0,
        )
        count += tl.sum(tl.where(is_positive & (row < rows)[:, None], 1.0, 0.0), 0)
        part_top, part_total = sum_exponentials(
            subtract_margin(scores, is_positive, margin), number, 0
        )
        new_top = tl.maximum(top, part_top)
        total = total * tl.exp2((number * LOG2_E) * (top - new_top))
        total += part_total * tl.exp2((number * LOG2_E) * (part_top - new_top))
        top = new_top
    inside = column < columns
    tl.store(column_state + column, top, mask=inside)
    tl.store(column_state + columns + column, total, mask=inside)
    tl.store(column_state + 2 * columns + column, count, mask=inside)


@triton.jit
def _scores(
    products,
    inverse,
    clamped_row,
    clamped_column,
    rows,
    columns,
    SCALED: tl.constexpr,  # noqa: N803
    SELF_SIMILARITY: tl.constexpr,  # noqa: N803
):
    """(the scores of some rows and columns, the factors by which the products were multiplied)."""
    at = clamped_row.to(tl.int64)[:, None] * columns + clamped_column[None, :]
    scores = tl.load(products + at)
    factor = 1.0
    if SCALED:
        column_inverse = inverse if SELF_SIMILARITY else inverse + rows
        factor = rest_of(tl.load(inverse + clamped_row))[:, None]
        factor = factor * rest_of(tl.load(column_inverse + clamped_column))[None, :]
        scores *= factor
    return scores, factor

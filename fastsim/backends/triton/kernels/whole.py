"""A small batch: losses and score gradients from the matrix of products.

A library product has written the products of all rows with all columns. A program reads the
products of a few rows once and writes the rows' losses and score gradients. The arguments are those
of tile.py, and

losses: (N,) receives the losses, times the weight.
sums: (2, N) receives dL/dscale and dL/dbias of each row, times the weight; or None.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E, sum_exponentials
from fastsim.backends.triton.kernels.epilogues.whole import less_margin
from fastsim.backends.triton.kernels.pairs import LEFT_OUT, pairs_of
from fastsim.backends.triton.kernels.places import number_or
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
    of_columns,
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
    TOGETHER: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """The losses and score gradients of some rows.

    products: (N, M) float32.
    inverse: (N + M,) inverse norms of x and y; (N,) if x is compared with itself (TOGETHER).
    panel: (N, stride) receives GAIN times dL_i/dlogit_ij. It may be in the memory of the products,
        or None.
    of_columns: (3, M) the results of `whole_columns_kernel`, or None.
    SCALED: whether the products are those of `ScaledRows`.
    EPILOGUE, FLAG: a function of epilogues/whole.py, and its FLAG.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    row_at, column_at = tl.minimum(row, rows - 1), tl.minimum(column, columns - 1)
    pairs = (positives, row_ids, column_ids, row_groups, column_groups, None, 0, 0, 0)
    scores, factor = _scores(products, inverse, row_at, column_at, rows, columns, SCALED, TOGETHER)
    scores, target, own = pairs_of(
        scores, row, column, row_at, column_at, False, rows, columns, pairs, SKIP, NEGATIVE
    )
    numbers = (number_or(scale, 1.0), number_or(bias, 0.0), margin)
    column_values = ()
    if of_columns is not None:
        top = tl.load(of_columns + column_at)[None, :]
        total = tl.load(of_columns + columns + column_at)[None, :]
        column_values = (top, total, tl.load(of_columns + 2 * columns + column_at)[None, :])
    loss, grads = EPILOGUE(scores, target, own, column, numbers, column_values, FLAG)
    weight = number_or(weight, 1.0)
    tl.store(losses + row, (weight * loss).to(tl.float64), mask=row < rows)
    if sums is not None:
        # A pair that is left out has the gradient 0, and no score to multiply it by.
        scale_grad = weight * tl.sum(
            tl.where(grads == 0.0, 0.0, grads * less_margin(scores, own, margin)), 1
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
    of_columns,
    positives,
    row_ids,
    column_ids,
    scale,
    margin,
    rows,
    columns,
    SCALED: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Writes of_columns (3, M): of each column the maximum, the sum of exponentials, and the number
    of rows whose positive it is.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_at = tl.minimum(column, columns - 1)
    pairs = (positives, row_ids, column_ids, None, None, None, 0, 0, 0)
    number = number_or(scale, 1.0)
    top = tl.full((COLUMNS,), LEFT_OUT, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    count = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        row_at = tl.minimum(row, rows - 1)
        scores, _ = _scores(products, inverse, row_at, column_at, rows, columns, SCALED, TOGETHER)
        scores, _, own = pairs_of(
            scores, row, column, row_at, column_at, False, rows, columns, pairs, "nothing", 0.0
        )
        count += tl.sum(tl.where(own & (row < rows)[:, None], 1.0, 0.0), 0)
        part_top, part_total = sum_exponentials(less_margin(scores, own, margin), number, 0)
        new_top = tl.maximum(top, part_top)
        total = total * tl.exp2((number * LOG2_E) * (top - new_top))
        total += part_total * tl.exp2((number * LOG2_E) * (part_top - new_top))
        top = new_top
    inside = column < columns
    tl.store(of_columns + column, top, mask=inside)
    tl.store(of_columns + columns + column, total, mask=inside)
    tl.store(of_columns + 2 * columns + column, count, mask=inside)


@triton.jit
def _scores(
    products,
    inverse,
    row_at,
    column_at,
    rows,
    columns,
    SCALED: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
):
    """(the scores of some rows and columns, the factors by which the products were multiplied)."""
    at = row_at.to(tl.int64)[:, None] * columns + column_at[None, :]
    scores = tl.load(products + at)
    factor = 1.0
    if SCALED:
        of_columns = inverse if TOGETHER else inverse + rows
        factor = rest_of(tl.load(inverse + row_at))[:, None]
        factor = factor * rest_of(tl.load(of_columns + column_at))[None, :]
        scores *= factor
    return scores, factor

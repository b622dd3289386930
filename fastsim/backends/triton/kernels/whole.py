"""A small batch: losses and score gradients from the matrix of products.

A library product has written the products of all rows. A program reads some rows once, with all
columns, and writes their losses and score gradients. Arguments as in tile.py, and

losses: (N,) the losses, times the weight.
sums: (2, N) dL/dscale and dL/dbias of each row, times the weight; or None.
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
    panel: (N, stride) receives GAIN times dL_i/dlogit_ij; may be the memory of the products, or
        None.
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
    found = ()
    if of_columns is not None:
        top = tl.load(of_columns + column_at)[None, :]
        total = tl.load(of_columns + columns + column_at)[None, :]
        found = (top, total, tl.load(of_columns + 2 * columns + column_at)[None, :])
    loss, grads = EPILOGUE(scores, target, own, column, numbers, found, FLAG)
    weight = number_or(weight, 1.0)
    tl.store(losses + row, (weight * loss).to(tl.float64), mask=row < rows)
    if sums is not None:
        # A pair left out has gradient 0, and no score to multiply it by.
        along = weight * tl.sum(
            tl.where(grads == 0.0, 0.0, grads * less_margin(scores, own, margin)), 1
        )
        tl.store(sums + row, along.to(tl.float64), mask=row < rows)
        across = weight * tl.sum(grads, 1)
        tl.store(sums + rows + row, across.to(tl.float64), mask=row < rows)
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
    """Writes of_columns (3, M): the maximum of each column, its sum of exponentials, and the number
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
        here, more = sum_exponentials(less_margin(scores, own, margin), number, 0)
        both = tl.maximum(top, here)
        total = total * tl.exp2((number * LOG2_E) * (top - both))
        total += more * tl.exp2((number * LOG2_E) * (here - both))
        top = both
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
    """(scores, the factors by which they differ from the products) of some rows and columns."""
    at = row_at.to(tl.int64)[:, None] * columns + column_at[None, :]
    scores = tl.load(products + at)
    factor = 1.0
    if SCALED:
        of_columns = inverse if TOGETHER else inverse + rows
        factor = rest_of(tl.load(inverse + row_at))[:, None]
        factor = factor * rest_of(tl.load(of_columns + column_at))[None, :]
        scores *= factor
    return scores, factor

"""The scores of positives, computed by the same products as the tiles."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.loads_and_stores import rest_factors
from fastsim.backends.triton.kernels.product import product


@triton.jit(do_not_specialize=["steps", "rows"])
def positives_kernel(
    x,
    y,
    steps,
    x_rest,
    y_rest,
    positives,
    out,
    rows,
    PRECISION: tl.constexpr,  # noqa: N803
    SIZES: tl.constexpr,  # noqa: N803
):
    """Writes the score (rows,) of each row's positive.

    A program multiplies some rows by their positives, and takes the diagonal of the product.
    """
    start = tl.program_id(0) * SIZES.rows
    row, column = start + tl.arange(0, SIZES.rows), start + tl.arange(0, SIZES.columns)
    y_row = tl.load(positives + column, mask=column < rows, other=0)
    x_row = tl.minimum(row, rows - 1)
    scores = product(x, y, x_row, y_row, steps, steps * SIZES.depth, PRECISION, SIZES)
    if x_rest is not None:
        scores *= rest_factors(x_rest, y_rest, x_row, y_row)
    value = tl.sum(tl.where(row[:, None] == column[None, :], scores, 0.0), 1)
    tl.store(out + row, value, mask=row < rows)

"""Selection: the closest negative of the triplet loss, the hardest pairs by group."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _first_column(scores, top, column):
    """The first column in each row whose score is `top`, an integer in the bits of a float32."""
    first = tl.min(tl.where(scores == top[:, None], column[None, :], 2147483647), 1)
    return first.to(tl.float32, bitcast=True)


@triton.jit
def closest_forward(
    scores,
    target,
    is_positive,
    column,
    numbers,
    row_coefficients,
    column_coefficients,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: the largest score that may be chosen, and its column.

    row_coefficients: the largest score that each row may choose, or empty.
    """
    # A NaN is never chosen. It reaches the loss through the mean negative.
    admitted = (is_positive == 0) & (scores == scores)
    if len(row_coefficients) == 1:
        admitted = admitted & (scores <= row_coefficients[0])
    scores = tl.where(admitted, scores, LEFT_OUT)
    top = tl.max(scores, 1)
    return (top, _first_column(scores, top, column)), (), ()


@triton.jit
def hardest_forward(
    scores,
    target,
    is_positive,
    column,
    numbers,
    row_coefficients,
    column_coefficients,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: minus the lowest score in the row's group, its column, the highest outside, its column.

    column_coefficients: offsets that are subtracted from the scores, or empty.
    """
    # A NaN is never chosen.
    present = scores > LEFT_OUT
    if len(column_coefficients) == 1:
        scores -= column_coefficients[0]
    positives = tl.where(present & (target == 1.0), -scores, LEFT_OUT)
    low = tl.max(positives, 1)
    negatives = tl.where(present & (target != 1.0), scores, LEFT_OUT)
    high = tl.max(negatives, 1)
    low_column = _first_column(positives, low, column)
    return (low, low_column, high, _first_column(negatives, high, column)), (), ()

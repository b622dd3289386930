"""Normalised losses: InfoNCE, SupCon, matrix cross entropy.

L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    sum_exponentials,
    weighted_share,
    zero_left_out,
)


@triton.jit
def _subtract_margin(scores, is_positive, numbers):
    _, _, margin, _ = numbers
    if margin is not None:
        scores = tl.where(is_positive, scores - margin, scores)
    return scores


@triton.jit
def softmax_forward(
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
    """Rows: maximum, sum of exponentials, sum of t s, sum of t. Columns: the first two."""
    scale, _, _, _ = numbers
    scores = _subtract_margin(scores, is_positive, numbers)
    target = zero_left_out(scores, target)
    top, total = sum_exponentials(scores, scale, 1)
    rows = (top, total, tl.sum(target * scores, 1), tl.sum(target, 1))
    return rows, sum_exponentials(scores, scale, 0), ()


@triton.jit
def softmax_score_grad(
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
    scale, _, _, _ = numbers
    scores = _subtract_margin(scores, is_positive, numbers)
    top, weight, target_weight = row_coefficients
    out = weighted_share(scores, scale, top, weight)
    if len(column_coefficients) == 2:
        top, weight = column_coefficients
        out += weighted_share(scores, scale, top, weight)
    return (), (), (out - target_weight * zero_left_out(scores, target),)

"""Normalised losses: InfoNCE, SupCon, matrix cross entropy.

L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    sum_exponentials,
    taking_part,
    weighted_share,
)


@triton.jit
def _less_margin(scores, own, numbers):
    _, _, margin, _ = numbers
    if margin is not None:
        scores = tl.where(own, scores - margin, scores)
    return scores


@triton.jit
def softmax_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: maximum, sum of exponentials, sum of t s, sum of t. Columns: the first two."""
    scale, _, _, _ = numbers
    scores = _less_margin(scores, own, numbers)
    target = taking_part(scores, target)
    top, total = sum_exponentials(scores, scale, 1)
    rows = (top, total, tl.sum(target * scores, 1), tl.sum(target, 1))
    return rows, sum_exponentials(scores, scale, 0), ()


@triton.jit
def softmax_score_grad(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    scores = _less_margin(scores, own, numbers)
    top, weight, target_weight = of_rows
    out = weighted_share(scores, scale, top, weight)
    if len(of_columns) == 2:
        top, weight = of_columns
        out += weighted_share(scores, scale, top, weight)
    return (), (), (out - target_weight * taking_part(scores, target),)

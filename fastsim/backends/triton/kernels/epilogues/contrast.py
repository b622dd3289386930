"""Positives against negatives: multi-similarity, NT-Xent, the decoupled loss."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    sigmoids_and_exponential,
    sum_exponentials,
    sum_logs_one_plus,
    weighted_share,
    zero_left_out,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _sides(scores, target):
    """(scores of negatives, negated scores of positives), both LEFT_OUT at all other pairs."""
    same_group = target == 1.0
    positive = same_group & ((scores <= LEFT_OUT) == 0)
    return tl.where(same_group, LEFT_OUT, scores), tl.where(positive, -scores, LEFT_OUT)


@triton.jit
def contrast_forward(
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
    """Rows: maximum and sum of exponentials of negatives, then of negated positives."""
    scale, _, _, positive_scale = numbers
    negative_scores, negated_positives = _sides(scores, target)
    negatives = sum_exponentials(negative_scores, scale, 1)
    return negatives + sum_exponentials(negated_positives, positive_scale, 1), (), ()


@triton.jit
def multi_similarity_score_grad(
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
    scale, _, _, positive_scale = numbers
    negative_scores, negated_positives = _sides(scores, target)
    top, weight, positive_top, positive_weight = row_coefficients
    up = weighted_share(negative_scores, scale, top, weight)
    down = weighted_share(negated_positives, positive_scale, positive_top, positive_weight)
    return (), (), (up - down,)


@triton.jit
def _positive_terms(negated_positives, scale, top, log_sum):
    """sigma(x), e^-|x| and max(x, 0) of each positive, 0 at other pairs.

    x is the log-sum-exp of the negatives minus the positive's logit. The positive's loss is
    softplus(x).
    """
    x = tl.fma(top + negated_positives, scale, log_sum)
    share, _, e = sigmoids_and_exponential(x)
    rest = zero_left_out(negated_positives, tl.where(x < 0, 0.0, x))
    return zero_left_out(negated_positives, share), zero_left_out(negated_positives, e), rest


@triton.jit
def multi_positive_forward(
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
    """Rows: sums over positives of the losses and of dL/dx."""
    scale, _, _, _ = numbers
    _, negated_positives = _sides(scores, target)
    top, log_sum = row_coefficients
    share, e, rest = _positive_terms(negated_positives, scale, top, log_sum)
    return (tl.sum(rest, 1) + sum_logs_one_plus(e), tl.sum(share, 1)), (), ()


@triton.jit
def multi_positive_score_grad(
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
    negative_scores, negated_positives = _sides(scores, target)
    top, weight, log_sum, positive_weight = row_coefficients
    share, _, _ = _positive_terms(negated_positives, scale, top, log_sum)
    return (), (), (weighted_share(negative_scores, scale, top, weight) - positive_weight * share,)


@triton.jit
def decoupled_forward(
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
    """Rows: maximum and sum of exponentials of the negatives."""
    scale, _, _, _ = numbers
    return sum_exponentials(tl.where(is_positive, LEFT_OUT, scores), scale, 1), (), ()


@triton.jit
def decoupled_score_grad(
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
    top, weight, positive_weight = row_coefficients
    negatives = weighted_share(tl.where(is_positive, LEFT_OUT, scores), scale, top, weight)
    return (), (), (zero_left_out(scores, tl.where(is_positive, -positive_weight, negatives)),)

"""Positives against negatives: multi-similarity, NT-Xent, the decoupled loss."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    shares_and_exponential,
    sum_exponentials,
    sum_logs_one_plus,
    taking_part,
    weighted_share,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _sides(scores, target):
    """(scores of negatives, negated scores of positives), both LEFT_OUT at all other pairs."""
    own = target == 1.0
    positive = own & ((scores <= LEFT_OUT) == 0)
    return tl.where(own, LEFT_OUT, scores), tl.where(positive, -scores, LEFT_OUT)


@triton.jit
def contrast_forward(
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
    """Rows: maximum and sum of exponentials of negatives, then of negated positives."""
    scale, _, _, positive_scale = numbers
    rising, falling = _sides(scores, target)
    negatives = sum_exponentials(rising, scale, 1)
    return negatives + sum_exponentials(falling, positive_scale, 1), (), ()


@triton.jit
def multi_similarity_score_grad(
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
    scale, _, _, positive_scale = numbers
    rising, falling = _sides(scores, target)
    top, weight, positive_top, positive_weight = of_rows
    up = weighted_share(rising, scale, top, weight)
    return (), (), (up - weighted_share(falling, positive_scale, positive_top, positive_weight),)


@triton.jit
def _positive_terms(falling, scale, top, log_sum):
    """sigma(x), e^-|x| and max(x, 0) of each positive, 0 at other pairs.

    x is the log-sum-exp of the negatives minus the positive's logit. The positive's loss is
    softplus(x).
    """
    x = tl.fma(top + falling, scale, log_sum)
    share, _, e = shares_and_exponential(x)
    rest = taking_part(falling, tl.where(x < 0, 0.0, x))
    return taking_part(falling, share), taking_part(falling, e), rest


@triton.jit
def multi_positive_forward(
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
    """Rows: sums over positives of the losses and of dL/dx."""
    scale, _, _, _ = numbers
    _, falling = _sides(scores, target)
    top, log_sum = of_rows
    share, e, rest = _positive_terms(falling, scale, top, log_sum)
    return (tl.sum(rest, 1) + sum_logs_one_plus(e), tl.sum(share, 1)), (), ()


@triton.jit
def multi_positive_score_grad(
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
    rising, falling = _sides(scores, target)
    top, weight, log_sum, positive_weight = of_rows
    share, _, _ = _positive_terms(falling, scale, top, log_sum)
    return (), (), (weighted_share(rising, scale, top, weight) - positive_weight * share,)


@triton.jit
def decoupled_forward(
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
    """Rows: maximum and sum of exponentials of the negatives."""
    scale, _, _, _ = numbers
    return sum_exponentials(tl.where(own, LEFT_OUT, scores), scale, 1), (), ()


@triton.jit
def decoupled_score_grad(
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
    top, weight, positive_weight = of_rows
    negatives = weighted_share(tl.where(own, LEFT_OUT, scores), scale, top, weight)
    return (), (), (taking_part(scores, tl.where(own, -positive_weight, negatives)),)

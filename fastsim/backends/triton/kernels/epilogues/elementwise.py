"""Losses that are sums over pairs: SigLIP and the squared error of a matrix."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    sigmoids_and_exponential,
    sum_logs_one_plus,
    zero_left_out,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def sigmoid(
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
    """Rows: sum of the losses, sum of dL/dz."""
    scale, bias, _, _ = numbers
    losses, score_grad = sigmoid_terms(scores, target, scale, bias)
    rows = losses, tl.sum(score_grad, 1)
    if SCORE_GRAD:
        return rows, (), ((row_coefficients[0] * scale) * score_grad,)
    else:
        return rows, (), ()


@triton.jit
def sigmoid_terms(scores, target, scale, bias):
    """(the sum of the losses of each row, dL/dz of each pair)."""
    # For a pair that is left out the logit is about minus infinity and the target 0, so that its
    # loss and its gradient are 0.
    logit = tl.where(scores <= LEFT_OUT, LEFT_OUT, tl.fma(scores, scale, bias))
    label = zero_left_out(scores, tl.fma(target, 0.5, 0.5))
    share, complement, e = sigmoids_and_exponential(logit)
    # The loss is softplus(z) - label z = rest + log(1 + e^-|z|). The logarithms are summed as the
    # logarithm of a product.
    rest = tl.where(logit < 0, 0.0, logit) - label * logit
    # sigma(z) - label, written so that nothing cancels for positives.
    score_grad = (1.0 - label) * share - label * complement
    return tl.sum(rest, 1) + sum_logs_one_plus(e), score_grad


@triton.jit
def squared_error(
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
    """Rows: sum of the losses."""
    difference = zero_left_out(scores, scores - target)
    rows = (tl.sum(difference * difference, 1),)
    if SCORE_GRAD:
        return rows, (), ((2.0 * row_coefficients[0]) * difference,)
    else:
        return rows, (), ()

"""Losses that are sums over pairs: SigLIP and the squared error of a matrix."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    shares_and_exponential,
    sum_logs_one_plus,
    taking_part,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def sigmoid(
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
    """Rows: sum of the losses, sum of dL/dz."""
    scale, bias, _, _ = numbers
    losses, excess = sigmoid_terms(scores, target, scale, bias)
    rows = losses, tl.sum(excess, 1)
    if SCORE_GRAD:
        return rows, (), ((of_rows[0] * scale) * excess,)
    else:
        return rows, (), ()


@triton.jit
def sigmoid_terms(scores, target, scale, bias):
    """(the sum of the losses of each row, dL/dz of each pair)."""
    # For a pair that is left out the logit is about minus infinity and the target 0, so that its
    # loss and its gradient are 0.
    logit = tl.where(scores <= LEFT_OUT, LEFT_OUT, tl.fma(scores, scale, bias))
    wanted = taking_part(scores, tl.fma(target, 0.5, 0.5))
    share, complement, e = shares_and_exponential(logit)
    # The loss is softplus(z) - wanted z = rest + log(1 + e^-|z|). The logarithms are summed as the
    # logarithm of a product.
    rest = tl.where(logit < 0, 0.0, logit) - wanted * logit
    # sigma(z) - wanted, written so that nothing cancels for positives.
    excess = (1.0 - wanted) * share - wanted * complement
    return tl.sum(rest, 1) + sum_logs_one_plus(e), excess


@triton.jit
def squared_error(
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
    """Rows: sum of the losses."""
    difference = taking_part(scores, scores - target)
    rows = (tl.sum(difference * difference, 1),)
    if SCORE_GRAD:
        return rows, (), ((2.0 * of_rows[0]) * difference,)
    else:
        return rows, (), ()

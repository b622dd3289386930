"""Losses that are sums over pairs: SigLIP, the squared error of a matrix."""

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
    """(sums of the losses by rows, dL/dz of each pair)."""
    # A pair that takes no part: a logit of minus infinity and no target, so that all is 0.
    logit = tl.where(scores <= LEFT_OUT, LEFT_OUT, tl.fma(scores, scale, bias))
    wanted = taking_part(scores, tl.fma(target, 0.5, 0.5))
    share, complement, e = shares_and_exponential(logit)
    # softplus(z) - wanted z, of which log(1 + e^-|z|) is summed by a product.
    rest = tl.where(logit < 0, 0.0, logit) - wanted * logit
    # sigma(z) - wanted, in which a positive's share would cancel.
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

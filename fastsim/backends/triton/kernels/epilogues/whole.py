"""Losses of whole rows: each returns (losses, dL_i/dlogit_ij).

numbers: scale, bias, margin.
of_columns: for a loss that also depends on columns, the maximum of each, its sum of exponentials,
    and the number of rows whose positive it is; else empty.
FLAG: an option of the loss.
"""

import torch
import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.elementwise import sigmoid_terms
from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E, taking_part
from fastsim.backends.triton.kernels.pairs import LEFT_OUT
from fastsim.ties import SLACK

OF_EQUALS = tl.constexpr(SLACK * torch.finfo(torch.float32).eps)  # as `ties.highest_equal`


@triton.jit
def less_margin(scores, own, margin):
    if margin is not None:
        scores = tl.where(own, scores - margin, scores)
    return scores


@triton.jit
def softmax(scores, target, own, column, numbers, of_columns, FLAG: tl.constexpr):  # noqa: N803
    """The targets, none of them negative, are divided by their sum in each row."""
    scale, _, margin = numbers
    scores = less_margin(scores, own, margin)
    target = taking_part(scores, target)
    top = tl.max(scores, 1)
    below = tl.where(top <= LEFT_OUT, 0.0, top)
    shares = tl.exp2((scale * LOG2_E) * (scores - below[:, None]))
    total = tl.sum(shares, 1)
    total = tl.where(total == 0.0, 1.0, total)  # past the last row
    wanted, positive = tl.sum(target, 1), tl.sum(target * scores, 1)
    share = tl.where(wanted == 0.0, 0.0, 1.0 / tl.where(wanted == 0.0, 1.0, wanted))
    # The loss of a row without targets is 0, whatever its log-sum-exp, unless it is NaN.
    none = (wanted == 0.0) & (positive == 0.0)
    losses = scale * (top - positive * share) + tl.log(total)
    grads = shares / total[:, None]
    if len(of_columns) == 3:
        of_column, sums, count = of_columns
        # A column that is no row's positive has no loss, and may have no score for a maximum.
        of_column, sums = tl.where(count == 0.0, 0.0, of_column), tl.where(count == 0.0, 1.0, sums)
        losses += scale * (tl.sum(tl.where(own, of_column, 0.0), 1) - positive)
        losses = 0.5 * (losses + tl.sum(tl.where(own, tl.log(sums), 0.0), 1))
        across = tl.exp2((scale * LOG2_E) * (scores - of_column)) / sums
        grads = 0.5 * (grads + tl.where(count == 0.0, 0.0, count * across))
    grads = grads - target * share[:, None]
    return tl.where(none, 0.0, losses), tl.where(none[:, None], 0.0, grads)


@triton.jit
def sigmoid(scores, target, own, column, numbers, of_columns, FLAG: tl.constexpr):  # noqa: N803
    scale, bias, _ = numbers
    return sigmoid_terms(scores, target, scale, bias)


@triton.jit
def triplet(scores, target, own, column, numbers, of_columns, FLAG: tl.constexpr):  # noqa: N803
    """FLAG: whether only negatives that are no closer than the positive are candidates."""
    _, _, margin = numbers
    negative = (own == 0) & ((scores <= LEFT_OUT) == 0)
    positive = tl.sum(tl.where(own, scores, 0.0), 1)
    count = tl.sum(tl.where(negative, 1.0, 0.0), 1)
    some = count > 0
    share = tl.where(some, 1.0 / tl.where(some, count, 1.0), 0.0)
    mean = tl.sum(tl.where(negative, scores, 0.0), 1) * share
    # A NaN is no candidate.
    admitted = negative & (scores == scores)
    if FLAG:
        admitted = admitted & (scores <= positive[:, None] + OF_EQUALS)
    candidates = tl.where(admitted, scores, LEFT_OUT)
    closest = tl.max(candidates, 1)
    first = tl.min(tl.where(candidates == closest[:, None], column[None, :], 2147483647), 1)
    # NaN <= 0 is false, so that a NaN reaches the loss.
    far = mean - positive + margin
    of_mean = tl.where(some & ((far <= 0) == 0), 1.0, 0.0)
    near = closest - positive + margin
    of_closest = tl.where((closest > LEFT_OUT) & ((near <= 0) == 0), 1.0, 0.0)
    losses = tl.where(of_mean > 0, far, 0.0) + tl.where(of_closest > 0, near, 0.0)
    losses = tl.where(positive == positive, losses, positive)
    grads = tl.where(negative, (of_mean * share)[:, None], 0.0)
    grads += tl.where(column[None, :] == first[:, None], of_closest[:, None], 0.0)
    return losses, tl.where(own, -(of_mean + of_closest)[:, None], grads)

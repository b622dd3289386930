"""Losses of whole rows: each returns (losses, dL_i/dlogit_ij).

numbers: scale, bias, margin.
column_state: for a loss that also depends on columns, three vectors (1, C): the maximum of each
    column, its sum of exponentials, and the number of rows whose positive it is. Else it is empty.
FLAG: an option of the loss.
"""

import torch
import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.elementwise import sigmoid_terms
from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E, zero_left_out
from fastsim.backends.triton.kernels.pairs import LEFT_OUT
from fastsim.ties import SLACK

TIE_TOLERANCE = tl.constexpr(SLACK * torch.finfo(torch.float32).eps)  # as `ties.highest_equal`


@triton.jit
def subtract_margin(scores, is_positive, margin):
    if margin is not None:
        scores = tl.where(is_positive, scores - margin, scores)
    return scores


@triton.jit
def softmax(scores, target, is_positive, column, numbers, column_state, FLAG: tl.constexpr):  # noqa: N803
    """The targets of a row are divided by their sum. None of them may be negative."""
    scale, _, margin = numbers
    scores = subtract_margin(scores, is_positive, margin)
    target = zero_left_out(scores, target)
    top = tl.max(scores, 1)
    reference = tl.where(top <= LEFT_OUT, 0.0, top)
    shares = tl.exp2((scale * LOG2_E) * (scores - reference[:, None]))
    total = tl.sum(shares, 1)
    total = tl.where(total == 0.0, 1.0, total)  # past the last row
    target_sum, positive = tl.sum(target, 1), tl.sum(target * scores, 1)
    inverse = tl.where(target_sum == 0.0, 0.0, 1.0 / tl.where(target_sum == 0.0, 1.0, target_sum))
    # The loss of a row without targets is 0 whatever its log-sum-exp is, unless it is NaN.
    empty = (target_sum == 0.0) & (positive == 0.0)
    losses = scale * (top - positive * inverse) + tl.log(total)
    grads = shares / total[:, None]
    if len(column_state) == 3:
        tops, sums, count = column_state
        # A column that is no row's positive has no loss. It may also have no pairs, so no maximum.
        tops, sums = tl.where(count == 0.0, 0.0, tops), tl.where(count == 0.0, 1.0, sums)
        losses += scale * (tl.sum(tl.where(is_positive, tops, 0.0), 1) - positive)
        losses = 0.5 * (losses + tl.sum(tl.where(is_positive, tl.log(sums), 0.0), 1))
        column_shares = tl.exp2((scale * LOG2_E) * (scores - tops)) / sums
        grads = 0.5 * (grads + tl.where(count == 0.0, 0.0, count * column_shares))
    grads = grads - target * inverse[:, None]
    return tl.where(empty, 0.0, losses), tl.where(empty[:, None], 0.0, grads)


@triton.jit
def sigmoid(scores, target, is_positive, column, numbers, column_state, FLAG: tl.constexpr):  # noqa: N803
    scale, bias, _ = numbers
    return sigmoid_terms(scores, target, scale, bias)


@triton.jit
def triplet(scores, target, is_positive, column, numbers, column_state, FLAG: tl.constexpr):  # noqa: N803
    """FLAG: whether only negatives that are no closer than the positive are candidates."""
    _, _, margin = numbers
    negative = (is_positive == 0) & ((scores <= LEFT_OUT) == 0)
    positive = tl.sum(tl.where(is_positive, scores, 0.0), 1)
    count = tl.sum(tl.where(negative, 1.0, 0.0), 1)
    has_negatives = count > 0
    count_inverse = tl.where(has_negatives, 1.0 / tl.where(has_negatives, count, 1.0), 0.0)
    mean = tl.sum(tl.where(negative, scores, 0.0), 1) * count_inverse
    # A NaN is never chosen.
    admitted = negative & (scores == scores)
    if FLAG:
        admitted = admitted & (scores <= positive[:, None] + TIE_TOLERANCE)
    candidates = tl.where(admitted, scores, LEFT_OUT)
    closest = tl.max(candidates, 1)
    is_closest = candidates == closest[:, None]
    closest_column = tl.min(tl.where(is_closest, column[None, :], 2147483647), 1)
    # NaN <= 0 is false, so that a NaN reaches the loss.
    mean_term = mean - positive + margin
    mean_active = tl.where(has_negatives & ((mean_term <= 0) == 0), 1.0, 0.0)
    closest_term = closest - positive + margin
    closest_active = tl.where((closest > LEFT_OUT) & ((closest_term <= 0) == 0), 1.0, 0.0)
    losses = tl.where(mean_active > 0, mean_term, 0.0)
    losses += tl.where(closest_active > 0, closest_term, 0.0)
    losses = tl.where(positive == positive, losses, positive)
    grads = tl.where(negative, (mean_active * count_inverse)[:, None], 0.0)
    grads += tl.where(column[None, :] == closest_column[:, None], closest_active[:, None], 0.0)
    return losses, tl.where(is_positive, -(mean_active + closest_active)[:, None], grads)

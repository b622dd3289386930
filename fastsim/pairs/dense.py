"""Targets and pairs that take part as N x M matrices, for the dense specifications."""

import torch

from fastsim.precision import widened
from fastsim.ties import highest_equal, size_of_rows


def dense_targets(pairs, rows, columns, dtype, device):
    """The (N, M) target matrix of `pairs`, for the dense specifications."""
    if pairs.dense is not None:
        return pairs.dense.to(dtype)
    if pairs.row_groups is not None:
        same = pairs.row_groups[:, None] == pairs.column_groups[None, :]
        return torch.where(same, 1.0, pairs.negative_target).to(dtype)
    targets = torch.zeros(rows, columns, dtype=dtype, device=device)
    return targets.scatter(1, pairs.positives[:, None], 1.0)


def pair_mask(pairs, rows, columns, device):
    """The (N, M) bool matrix of pairs that take part, for the dense specifications."""
    index = torch.arange(max(rows, columns), device=device)
    row, column = index[:rows, None] + pairs.offset, index[None, :columns]
    part = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if pairs.skip == "diagonal":
        part = row != column
    elif pairs.skip == "lower":
        part = column > row
    if pairs.row_ids is not None:
        same = pairs.row_ids[:, None] == pairs.column_ids[None, :]
        if pairs.positives is not None:
            same = same & (column != pairs.positives[:, None])
        part = part & ~same
    if pairs.guide is not None:
        # In double precision, as the thresholds, which are found by another sum.
        sides = (pairs.guide.rows, pairs.guide.columns)
        rows_, columns_ = (torch.nn.functional.normalize(widened(side), dim=1) for side in sides)
        guided = rows_ @ columns_.T
        thresholds = pairs.guide.thresholds[:, None]
        above = guided.to(thresholds.dtype) > highest_equal(thresholds)
        if pairs.positives is not None:
            above = above & (column != pairs.positives[:, None])
        part = part & ~above
    return part


def not_above(scores, positives, margin):
    """The (N, M) bool matrix of scores that are not more than `margin` above the row's positive.

    A NaN is not, so that it reaches the loss.
    """
    scores = scores.detach()
    limits = scores.gather(1, positives[:, None]) + margin
    return ~(scores > highest_equal(limits, size_of_rows(scores)))

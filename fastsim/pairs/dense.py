"""Targets and masks of pairs as N x M matrices, for the dense specifications."""

import torch

from fastsim.precision import widened
from fastsim.ties import highest_equal, size_of_rows


def dense_targets(pairs, rows, columns, dtype, device):
    """The (N, M) target matrix of `pairs`."""
    if pairs.dense is not None:
        return pairs.dense.to(dtype)
    if pairs.row_groups is not None:
        same = pairs.row_groups[:, None] == pairs.column_groups[None, :]
        return torch.where(same, 1.0, pairs.negative_target).to(dtype)
    targets = torch.zeros(rows, columns, dtype=dtype, device=device)
    return targets.scatter(1, pairs.positives[:, None], 1.0)


def pair_mask(pairs, rows, columns, device):
    """The (N, M) bool matrix of the pairs that take part."""
    index = torch.arange(max(rows, columns), device=device)
    row, column = index[:rows, None] + pairs.offset, index[None, :columns]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if pairs.skip == "diagonal":
        mask = row != column
    elif pairs.skip == "lower":
        mask = column > row
    if pairs.row_ids is not None:
        same = pairs.row_ids[:, None] == pairs.column_ids[None, :]
        if pairs.positives is not None:
            same = same & (column != pairs.positives[:, None])
        mask = mask & ~same
    if pairs.guide is not None:
        # In double precision, as the thresholds come from another order of summation.
        sides = (pairs.guide.rows, pairs.guide.columns)
        unit_rows, unit_columns = (
            torch.nn.functional.normalize(widened(side), dim=1) for side in sides
        )
        cosines = unit_rows @ unit_columns.T
        thresholds = pairs.guide.thresholds[:, None]
        above = cosines.to(thresholds.dtype) > highest_equal(thresholds)
        if pairs.positives is not None:
            above = above & (column != pairs.positives[:, None])
        mask = mask & ~above
    return mask


def not_above(scores, positives, margin):
    """The (N, M) bool matrix: False where a score exceeds that of the row's positive by more than
    `margin`. A NaN is True, so that it reaches the loss.
    """
    scores = scores.detach()
    limits = scores.gather(1, positives[:, None]) + margin
    return ~(scores > highest_equal(limits, size_of_rows(scores)))

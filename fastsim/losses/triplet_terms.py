"""The terms of the full triplet loss without the score matrix."""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends.rows import add_rows, take_rows
from fastsim.engine.chosen_rows import row_terms
from fastsim.engine.ring import ring_closest, ring_sum
from fastsim.scores import paired, unit_rows


def units(anchors, positives, backend):
    """The unit rows of both, differentiable; one tensor if both arguments are one tensor."""
    unit_x = unit_rows(anchors, backend)
    return unit_x, unit_x if positives is anchors else unit_rows(positives, backend)


def terms_of_rows(unit_x, unit_y, indices, pairs, backend, first=0):
    """(scores of the positives, means of the negatives, closest negatives), (N,) each.

    -inf if a row has no such negative.
    indices: (N,) the columns of the closest negatives, -1 without one.
    first: the column of the first row's positive.
    """
    (positive, closest), sums = row_terms(unit_x, unit_y, indices, first, backend)
    excluded = ()
    if pairs.row_ids is not None:
        excluded = _excluded_scores(unit_x, unit_y, pairs)
    mean = _mean(positive, sums, excluded, pairs, unit_y.shape[0])
    return positive, mean, torch.where(indices >= 0, closest, -torch.inf)


def terms_of_ring(anchors, positives, mining, pairs, batch, backend, row_metrics):
    """`terms_of_rows` for a ring, in which the columns travel between ranks."""
    unit_x, unit_y = units(anchors, positives, backend)
    semi_hard = mining == "semi-hard"
    sides = anchors.detach(), positives.detach(), unit_x, unit_y
    indices = ring_closest(*sides, semi_hard, pairs, batch, backend, row_metrics)

    def of_block(unit_x, unit_y, columns):
        within = indices - columns.start
        here = (within >= 0) & (within < len(unit_y))
        closest = paired(unit_x, take_rows(unit_y, within.clamp(0, len(unit_y) - 1)))
        parts = [torch.mv(unit_x, unit_y.sum(0)), torch.where(here, closest, 0.0)]
        if pairs.row_ids is not None:
            parts += _excluded_scores(unit_x, unit_y, pairs.of_columns(columns))
        return parts

    with without_autocast(unit_x.device.type):
        sums, closest, *excluded = ring_sum(of_block, unit_x, unit_y, batch)
    positive = paired(unit_x, unit_y[: len(unit_x)])
    mean = _mean(positive, sums, excluded, pairs, batch.columns)
    return positive, mean, torch.where(indices >= 0, closest, -torch.inf)


def _mean(positive, sums, excluded, pairs, columns):
    """(N,) the mean of each row's negatives.

    sums: (N,) the sum of all scores of the row. excluded: () or (sum, number) of the scores with
    columns of the row's id.
    """
    sums = sums - positive
    counts = torch.full_like(positive, columns - 1)
    if excluded:
        scores, hits = excluded
        # If the positive has the row's id, it has been subtracted twice.
        twice = pairs.column_ids[pairs.positives] == pairs.row_ids
        sums = sums - scores + torch.where(twice, positive, 0.0)
        counts = counts - hits + twice
    return torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)


def _excluded_scores(unit_x, unit_y, pairs):
    """(sums of the scores with columns of the row's id, numbers of these columns), (N,) each."""
    sums, counts = _excluded_sums(unit_y, pairs)
    return paired(unit_x, sums), counts


def _excluded_sums(unit_y, pairs):
    """For each row the sum (N, D) and the number (N,) of the columns with its id."""
    # A sort and a search: torch.unique would wait for a GPU to learn the number of distinct ids.
    ids = pairs.column_ids.sort().values
    group = torch.searchsorted(ids, pairs.column_ids)
    sums = add_rows(torch.zeros_like(unit_y), group, unit_y)
    ones = unit_y.new_ones(group.shape)
    counts = add_rows(torch.zeros_like(ones), group, ones)
    row_group = torch.searchsorted(ids, pairs.row_ids).clamp(max=ids.numel() - 1)
    known = (ids[row_group] == pairs.row_ids).to(unit_y.dtype)
    return take_rows(sums, row_group) * known[:, None], counts[row_group] * known

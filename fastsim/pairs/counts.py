"""How many columns of each row are its positives, and how many its negatives."""

import torch


def equal_counts(values, among):
    """`Backend.equal_counts` in plain torch."""
    among = among.sort().values
    first = torch.searchsorted(among, values)
    return torch.searchsorted(among, values, right=True) - first


def positive_counts(pairs, backend):
    """(N,) int64: how many columns of its own group each row has, itself left out where skipped."""
    counts = backend.equal_counts(pairs.row_groups, pairs.column_groups)
    if pairs.skip == "diagonal":
        if pairs.column_groups is pairs.row_groups:
            return counts - 1
        own = pairs.column_groups[pairs.offset :][: pairs.row_groups.shape[0]]
        counts = counts - (own == pairs.row_groups).long()
    return counts


def negative_counts(pairs, columns, backend):
    """(N,) int64: how many of the columns are negatives of each row with its one positive."""
    counts = torch.full_like(pairs.positives, columns - 1)
    if pairs.row_ids is None:
        return counts
    equal = backend.equal_counts(pairs.row_ids, pairs.column_ids)
    # The positive has its own id among them when its column carries the row's id.
    return counts - equal + (pairs.column_ids[pairs.positives] == pairs.row_ids)

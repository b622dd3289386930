"""The numbers of positives and of negatives of each row."""

import torch


def equal_counts(values, among):
    """`Backend.equal_counts` in plain torch."""
    among = among.sort().values
    first = torch.searchsorted(among, values)
    return torch.searchsorted(among, values, right=True) - first


def positive_counts(pairs, backend):
    """(N,) int64: the number of columns in the group of each row, less its own if it is skipped."""
    counts = backend.equal_counts(pairs.row_groups, pairs.column_groups)
    if pairs.skip == "diagonal":
        if pairs.column_groups is pairs.row_groups:
            return counts - 1
        own_columns = pairs.column_groups[pairs.offset :][: pairs.row_groups.shape[0]]
        counts = counts - (own_columns == pairs.row_groups).long()
    return counts


def negative_counts(pairs, columns, backend):
    """(N,) int64: the number of negatives of each row, which has one positive."""
    counts = torch.full_like(pairs.positives, columns - 1)
    if pairs.row_ids is None:
        return counts
    equal = backend.equal_counts(pairs.row_ids, pairs.column_ids)
    # `equal` includes the positive if its column has the id of the row.
    return counts - equal + (pairs.column_ids[pairs.positives] == pairs.row_ids)

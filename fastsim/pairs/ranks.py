"""The pairs of one rank, extended to the columns, or the rows and columns, of all ranks."""

from dataclasses import replace

import torch

from fastsim.pairs.arguments import parse_targets


def parse_own_targets(targets, x, y, group, *, skip="nothing"):
    """`parse_targets` for the rows of a rank, before the ranks communicate.

    A target matrix has the columns of all ranks; `fastsim.distributed.join` checks their number.
    """
    columns = y.shape[0]
    if group is not None and isinstance(targets, torch.Tensor) and targets.dim() == 2:
        columns = targets.shape[1]
    return parse_targets(targets, x.shape[0], columns, x.device, skip=skip)


def check_own_targets(targets, x, y, group):
    """Checks the targets of a rank as far as possible before the ranks communicate."""
    if group is not None and targets is not None:
        parse_own_targets(targets, x, y, group)


def global_positives(positives, batch):
    """`parse_positives` of the rank, from indices of its columns to those of all ranks."""
    return positives if batch.group is None else positives + batch.first_column


def global_exclude(ids, batch):
    """`parse_exclude` of the rank, with the columns of all ranks."""
    row_ids, column_ids = ids
    return row_ids, batch.gather_columns(column_ids)


def global_targets(targets, batch, device):
    """The `targets` of the rank's rows and columns, with the columns of all ranks."""
    if batch.group is None:
        return targets
    rows, columns = batch.row_counts[batch.rank], batch.column_counts[batch.rank]
    if targets is None:
        # One group for a row and its column; the groups of different ranks differ.
        groups = torch.arange(max(rows, columns), device=device) + (batch.rank << 40)
        targets = groups[:rows], groups[:columns]
    if isinstance(targets, torch.Tensor):
        return targets
    pairs = parse_targets(targets, rows, columns, device)
    return pairs.row_groups, batch.gather_columns(pairs.column_groups)


def global_groups(pairs, batch):
    """`parse_groups` of the rank's rows and columns, with the columns of all ranks."""
    if batch.group is None:
        return pairs
    groups = batch.gather_columns(pairs.column_groups)
    return replace(pairs, column_groups=groups, offset=batch.first_column)


def gather_targets(targets, batch):
    """The result of `global_targets`, with the rows of all ranks too."""
    if isinstance(targets, tuple):
        return batch.gather_rows(targets[0]), targets[1]
    return batch.gather_rows(targets)

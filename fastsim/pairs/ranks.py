"""A rank's pairs with the columns, and the rows, of all ranks."""

from dataclasses import replace

import torch

from fastsim.pairs.arguments import parse_targets


def parse_own_targets(targets, x, y, group, *, skip="nothing"):
    """`parse_targets` of a rank's rows, before the ranks have met.

    A matrix has the columns of all ranks, whose number `fastsim.distributed.join` checks.
    """
    columns = y.shape[0]
    if group is not None and isinstance(targets, torch.Tensor) and targets.dim() == 2:
        columns = targets.shape[1]
    return parse_targets(targets, x.shape[0], columns, x.device, skip=skip)


def check_own_targets(targets, x, y, group):
    """A rank's targets, as far as they can be checked before the ranks have met."""
    if group is not None and targets is not None:
        parse_own_targets(targets, x, y, group)


def global_positives(positives, batch):
    """The rank's `parse_positives` among its own columns -> among the columns of all ranks."""
    return positives if batch.group is None else positives + batch.first_column


def global_exclude(ids, batch):
    """The rank's `parse_exclude` -> with the columns of all ranks."""
    row_ids, column_ids = ids
    return row_ids, batch.gather_columns(column_ids)


def global_targets(targets, batch, device):
    """A loss's `targets` of the rank's own rows and columns -> with the columns of all ranks."""
    if batch.group is None:
        return targets
    rows, columns = batch.row_counts[batch.rank], batch.column_counts[batch.rank]
    if targets is None:
        # Groups of a row and its column, which no two ranks have in common.
        groups = torch.arange(max(rows, columns), device=device) + (batch.rank << 40)
        targets = groups[:rows], groups[:columns]
    if isinstance(targets, torch.Tensor):
        return targets
    pairs = parse_targets(targets, rows, columns, device)
    return pairs.row_groups, batch.gather_columns(pairs.column_groups)


def global_groups(pairs, batch):
    """`parse_groups` of the rank's own rows and columns -> with the columns of all ranks."""
    if batch.group is None:
        return pairs
    groups = batch.gather_columns(pairs.column_groups)
    return replace(pairs, column_groups=groups, offset=batch.first_column)


def gather_targets(targets, batch):
    """What `global_targets` returned -> with the rows of all ranks too."""
    if isinstance(targets, tuple):
        return batch.gather_rows(targets[0]), targets[1]
    return batch.gather_rows(targets)

"""Checks the arguments that describe pairs (positives, ids, biases, targets, groups), and converts
them to `Pairs`.
"""

import torch

from fastsim.checks import (
    FLOATING,
    INTEGRAL,
    check_alike,
    check_bias,
    check_constant,
    check_embeddings,
    check_flags,
    check_integers,
    check_range,
    check_scores,
    check_tensor,
)
from fastsim.pairs.record import Pairs
from fastsim.precision import compute_dtype
from fastsim.records import replaced

_NOTHING = Pairs()


def as_ids(integers):
    """Ids of rows or columns in the form that the backends take."""
    return integers.to(torch.int64).contiguous()


def parse_positives(positives, rows, columns, device):
    """`positives` as (N,) int64 columns, `arange(N)` by default."""
    if positives is None:
        return torch.arange(rows, device=device)
    check_integers("positives", positives, rows, device)
    check_range("positives", positives, columns)
    return as_ids(positives)


def parse_exclude(exclude, rows, columns, device):
    """`exclude=(row_ids, column_ids)` as two int64 tensors, or two Nones."""
    if exclude is None:
        return None, None
    row_ids, column_ids = _two("exclude", exclude, "(row_ids, column_ids)")
    check_integers("exclude[0]", row_ids, rows, device)
    check_integers("exclude[1]", column_ids, columns, device)
    return as_ids(row_ids), as_ids(column_ids)


def parse_bias(bias, columns, x):
    """The `candidate_bias` of a loss in the compute type of the embeddings x, or None."""
    check_bias("candidate_bias", bias, columns, x.device)
    return None if bias is None else as_bias(bias, x)


def as_bias(bias, x):
    """A bias in the compute type of x."""
    if bias.dtype is x.dtype is torch.float32 and bias.is_contiguous():
        return bias  # the common case; this check is cheaper than the calls below
    return bias.to(compute_dtype(x)).contiguous()


def parse_targets(targets, rows, columns, device, *, skip="nothing"):
    """The `Pairs` of an argument `targets`: a matrix, two group vectors, or None (diagonal)."""
    if targets is None:
        groups = torch.arange(max(rows, columns), device=device)
        return Pairs(row_groups=groups[:rows], column_groups=groups[:columns], skip=skip)
    if not (isinstance(targets, torch.Tensor) and targets.dim() == 2):
        what = "(row_groups, column_groups) or a matrix (N, M)"
        row_groups, column_groups = _two("targets", targets, what)
        check_integers("targets[0]", row_groups, rows, device)
        check_integers("targets[1]", column_groups, columns, device)
        row_groups, column_groups = as_ids(row_groups), as_ids(column_groups)
        return Pairs(row_groups=row_groups, column_groups=column_groups, skip=skip)
    dtypes = (*FLOATING, *INTEGRAL)
    what = "a real or integer matrix"
    check_tensor("targets", targets, ndim=2, dtypes=dtypes, what=what, empty=rows == 0)
    if targets.shape != (rows, columns):
        raise ValueError(
            f"targets: wanted shape {(rows, columns)} as the scores, got {tuple(targets.shape)}"
        )
    if targets.device != device:
        raise ValueError(f"targets: wanted device {device}, got {targets.device}")
    check_constant("targets", targets)
    return Pairs(dense=targets, skip=skip)


def known_targets(targets, rows, columns, device):
    """`parse_targets` for targets whose shapes, dtypes and devices have been checked."""
    if targets is None:
        return parse_targets(targets, rows, columns, device)
    if isinstance(targets, (tuple, list)):
        row_groups, column_groups = map(as_ids, targets)
        return replaced(_NOTHING, row_groups=row_groups, column_groups=column_groups)
    check_constant("targets", targets)
    return replaced(_NOTHING, dense=targets)


def parse_groups(embeddings, groups, references, reference_groups, own_first, *, empty=False):
    """`Pairs` of embeddings against references, or without references against themselves.

    The target is 1 if the groups are equal, else 0. own_first: whether the first references are the
    embeddings themselves. Then, and without references, pairs (i, i) are left out.
    """
    check_embeddings("embeddings", embeddings, empty=empty)
    if (references is None) != (reference_groups is None):
        name = "reference_groups" if references is None else "references"
        raise ValueError(f"references: wanted with reference_groups, got {name} alone")
    columns = embeddings.shape[0]
    if references is not None:
        check_embeddings("references", references, empty=empty)
        check_alike("references", references, "embeddings", embeddings)
        columns = references.shape[0]
    shape = embeddings.shape[0], columns
    return _grouped(shape, groups, reference_groups, own_first, embeddings.device)


def groups_of_scores(scores, groups, reference_groups, own_first):
    """`parse_groups` for scores (N, M); without reference_groups (N, N)."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    if reference_groups is None and rows != columns:
        raise ValueError(f"scores: wanted a square matrix, got shape {(rows, columns)}")
    return _grouped(scores.shape, groups, reference_groups, own_first, scores.device)


def _grouped(shape, groups, reference_groups, own_first, device):
    rows, columns = shape
    check_flags(own_first=own_first)
    check_integers("groups", groups, rows, device)
    groups = column_groups = as_ids(groups)
    if reference_groups is not None:
        check_integers("reference_groups", reference_groups, columns, device)
        column_groups = as_ids(reference_groups)
        if own_first and columns < rows:
            raise ValueError(
                f"references: wanted at least {rows} rows with own_first, got {columns}"
            )
    skip = "diagonal" if own_first or reference_groups is None else "nothing"
    return Pairs(row_groups=groups, column_groups=column_groups, negative_target=0.0, skip=skip)


def _two(name, value, what):
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        if isinstance(value, torch.Tensor):
            shown = f"shape {tuple(value.shape)}"  # its values would take many lines
        else:
            shown = f"{value!r:.60}"
        raise TypeError(f"{name}: wanted {what}, got {type(value).__name__} of {shown}")
    return value

"""Selection over all pairs: for each row the closest or hardest column."""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends import get
from fastsim.operators import define, traced
from fastsim.pairs import Pairs


def selected_rows(x, unit, backend):
    """The rows that a selection compares, x or its unit rows, without a gradient.

    They are x itself if the backend multiplies x exactly: rounding unit rows to the type of its
    operands could make another column the closest.
    """
    return (x if backend.scales_rows(x.dtype) else unit).detach()


def closest_column(x, y, dtype, semi_hard, pairs, backend, row_metrics=None):
    """The column (N,) int64 of each row's closest negative; -1 if it has none.

    x (N, D), y (M, D): `selected_rows` of embeddings in `dtype`. row_metrics: as in `TileLoss`;
    only while nothing is traced.
    """
    ids = pairs.row_ids, pairs.column_ids
    arguments = x, y, dtype, pairs.positives, *ids, semi_hard
    if row_metrics is not None:
        return _forward(*arguments, backend.name, row_metrics)
    return _closest(*arguments, backend.name)


def _forward(x, y, dtype, positives, row_ids, column_ids, semi_hard, backend, row_metrics=None):
    chosen = get(backend)
    if not len(x):  # a rank of a group may have no rows
        return torch.empty_like(positives)
    with without_autocast(x.device.type):
        pairs = Pairs(positives, row_ids, column_ids)
        operands = chosen.operand(x, dtype), chosen.operand(y, dtype)
        return chosen.closest(pairs, semi_hard, *operands, row_metrics=row_metrics)


def _forward_fake(x, y, dtype, positives, row_ids, column_ids, semi_hard, backend):
    return torch.empty_like(positives)


_closest = define(
    "closest",
    "(Tensor x, Tensor y, ScalarType dtype, Tensor positives, Tensor? row_ids,"
    " Tensor? column_ids, bool semi_hard, str backend) -> Tensor",
    _forward,
    _forward_fake,
)


# ---- the hardest pairs by group ----


def hardest_columns(x, y, offsets, dtype, pairs, backend):
    """The columns ((N,), (N,)) int64 of each row's hardest positive and negative; -1 for none.

    The hardest positive has the lowest x_i . y_j - offsets_j in the row's group, the hardest
    negative the highest outside it.

    x (N, D), y (M, D) or None for x itself: `selected_rows` of embeddings in `dtype`, or any rows
    in the compute type.
    """
    column_groups = None if pairs.column_groups is pairs.row_groups else pairs.column_groups
    groups = pairs.row_groups, column_groups
    return _hardest(x, y, offsets, dtype, *groups, pairs.skip, pairs.offset, backend.name)


def _hardest_forward(x, y, offsets, dtype, row_groups, column_groups, skip, offset, backend):
    chosen = get(backend)
    if not len(x):
        return torch.empty_like(row_groups), torch.empty_like(row_groups)
    column_groups = row_groups if column_groups is None else column_groups
    pairs = Pairs(row_groups=row_groups, column_groups=column_groups, skip=skip, offset=offset)
    with without_autocast(x.device.type):
        left = chosen.operand(x, dtype)
        right = left if y is None else chosen.operand(y, dtype)
        return chosen.hardest(pairs, offsets, left, right)


def _hardest_fake(x, y, offsets, dtype, row_groups, column_groups, skip, offset, backend):
    return torch.empty_like(row_groups), torch.empty_like(row_groups)


_hardest = define(
    "hardest",
    "(Tensor x, Tensor? y, Tensor? offsets, ScalarType dtype, Tensor row_groups,"
    " Tensor? column_groups, str skip, int offset, str backend) -> (Tensor, Tensor)",
    _hardest_forward,
    _hardest_fake,
)


def finds_hardest_pairs(x, backend):
    """Whether `hardest_pairs` serves rows x (N, D)."""
    return not traced() and backend.serves_hardest_pairs(*x.shape)


def hardest_pairs(x, groups, backend):
    """The hardest pairs among rows x (N, D) in one call, as in `Backend.hardest_pairs`: (columns
    (2, N), Euclidean distances (2, N), a number () that is finite if all of x is).
    """
    return backend.hardest_pairs(x.detach(), groups)


# ---- rows whose products order the distances ----


def centred_rows(x, y, backend):
    """`Backend.centred` of x (N, D) and y (M, D) or None, without a gradient."""
    rows, columns, *rest = _centred(x.detach(), None if y is None else y.detach(), backend.name)
    return rows, None if y is None else columns, *rest


def _centred_forward(x, y, backend):
    rows, columns, *rest = get(backend).centred(x, y)
    return rows, x.new_empty(0) if columns is None else columns, *rest


def _centred_fake(x, y, backend):
    columns = x.new_empty(0 if y is None else y.shape)
    offsets = x.new_empty((x if y is None else y).shape[0])
    return x.new_empty(x.shape), columns, offsets, x.new_empty(())


_centred = define(
    "centred",
    "(Tensor x, Tensor? y, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _centred_forward,
    _centred_fake,
)

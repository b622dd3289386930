"""Selection over all pairs as a registered operator: the closest negative's column."""

import torch

from fastsim.backends import get
from fastsim.operators import define
from fastsim.scores import without_autocast
from fastsim.targets import Pairs


def closest_column(unit_x, unit_y, dtype, semi_hard, pairs, backend):
    """Column (N,) int64 of each row's largest admitted cosine but its positive's; -1: none.

    unit_x (N, D), unit_y (M, D): unit rows in the compute type, of embeddings in `dtype`.
    """
    ids = pairs.row_ids, pairs.column_ids
    return _closest(
        unit_x.detach(), unit_y.detach(), dtype, pairs.positives, *ids, semi_hard, backend.name
    )


def _forward(unit_x, unit_y, dtype, positives, row_ids, column_ids, semi_hard, backend):
    chosen = get(backend)
    with without_autocast(unit_x.device.type):
        pairs = Pairs(positives, row_ids, column_ids)
        operands = chosen.operand(unit_x, dtype), chosen.operand(unit_y, dtype)
        return chosen.closest(pairs, semi_hard, *operands)


def _forward_fake(unit_x, unit_y, dtype, positives, row_ids, column_ids, semi_hard, backend):
    return torch.empty_like(positives)


_closest = define(
    "closest",
    "(Tensor unit_x, Tensor unit_y, ScalarType dtype, Tensor positives, Tensor? row_ids,"
    " Tensor? column_ids, bool semi_hard, str backend) -> Tensor",
    _forward,
    _forward_fake,
)

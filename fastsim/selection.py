"""Selection over all pairs as a registered operator: the closest negative's column."""

import torch

from fastsim.backends import get
from fastsim.operators import define
from fastsim.scores import without_autocast
from fastsim.targets import Pairs


def closest_column(x, y, semi_hard, pairs, backend):
    """Column (N,) int64 of each row's largest admitted cosine but its positive's; -1: none."""
    return _closest(
        x.detach(),
        y.detach(),
        pairs.positives,
        pairs.row_ids,
        pairs.column_ids,
        semi_hard,
        backend.name,
    )


def _forward(x, y, positives, row_ids, column_ids, semi_hard, backend):
    chosen = get(backend)
    with without_autocast(x.device.type):
        unit_x = chosen.unit_rows(x)[0]
        unit_y = unit_x if y is x else chosen.unit_rows(y)[0]
        pairs = Pairs(positives, row_ids, column_ids)
        return chosen.closest(pairs, semi_hard, unit_x, unit_y)


def _forward_fake(x, y, positives, row_ids, column_ids, semi_hard, backend):
    return torch.empty_like(positives)


_closest = define(
    "closest",
    "(Tensor x, Tensor y, Tensor positives, Tensor? row_ids, Tensor? column_ids, bool semi_hard,"
    " str backend) -> Tensor",
    _forward,
    _forward_fake,
)

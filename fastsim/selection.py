"""Selection over all pairs as a registered operator: the closest negative's column."""

import torch
from torch import Tensor

from fastsim import backends
from fastsim.scores import without_autocast
from fastsim.targets import Pairs


def closest_column(x, y, semi_hard, pairs, backend):
    """Column (N,) int64 of each row's largest admitted cosine but its positive's; -1: none."""
    return torch.ops.fastsim.closest(
        x, y, pairs.positives, pairs.row_ids, pairs.column_ids, semi_hard, backend.name
    )


@torch.library.custom_op("fastsim::closest", mutates_args=())
def _closest(
    x: Tensor,
    y: Tensor,
    positives: Tensor,
    row_ids: Tensor | None,
    column_ids: Tensor | None,
    semi_hard: bool,
    backend: str,
) -> Tensor:
    chosen = backends.get(backend)
    with without_autocast(x.device.type):
        unit_x = chosen.unit_rows(x)[0]
        unit_y = unit_x if y is x else chosen.unit_rows(y)[0]
        pairs = Pairs(positives, row_ids, column_ids)
        return chosen.closest(pairs, semi_hard, unit_x, unit_y)


@_closest.register_fake
def _(x, y, positives, row_ids, column_ids, semi_hard, backend):
    return torch.empty_like(positives)

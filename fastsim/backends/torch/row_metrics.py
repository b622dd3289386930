"""The row metrics of a block, from its scores (fastsim/batch_metrics.py)."""

from dataclasses import replace

import torch

from fastsim.backends.torch.block import LEFT_OUT
from fastsim.batch_metrics import MAXIMA


def add_row_metrics(block, row_metrics):
    """Adds the scores of a block to the metrics of its rows, (R, len(ROW_METRICS)).

    The block does not change: pairs are left out in a copy of its panel.
    """
    block = replace(block, panel=block.panel.clone(), bias=None)
    block.leave_out()
    panel, skipped = block.panel, _skipped(block)
    out = panel == LEFT_OUT
    by_id = torch.zeros_like(out)
    if block.row_ids is not None:
        by_id = block.row_ids[:, None] == block.column_ids
        if block.positives is not None:
            block.set_at_positives(by_id, False)
        by_id.logical_and_(~skipped)
    positive = _positive_pairs(block) & ~out
    negative = ~(positive | out)
    sums = []
    for part in (negative, positive):
        sums += [panel.masked_fill(~part, 0.0), part]
    sums += [by_id, out & ~by_id & ~skipped]
    highest = [panel.masked_fill(~part, LEFT_OUT).amax(1) for part in (negative, positive)]
    maxima = torch.stack(highest, 1).to(row_metrics.dtype)
    row_metrics[:, :MAXIMA] = torch.maximum(row_metrics[:, :MAXIMA], maxima)
    row_metrics[:, MAXIMA:] += torch.stack(
        [part.sum(1, dtype=row_metrics.dtype) for part in sums], 1
    )


def _positive_pairs(block):
    """(R, C) bool: the positive pairs, also those that are left out."""
    if block.dense is not None:
        return block.dense > 0
    if block.row_groups is not None:
        return block.same
    positive = torch.zeros_like(block.panel, dtype=torch.bool)
    if block.positives is not None:
        block.set_at_positives(positive, True)
    return positive


def _skipped(block):
    """(R, C) bool: the pairs that `Pairs.skip` leaves out."""
    rows, columns = block.panel.shape
    row = torch.arange(block.first, block.first + rows, device=block.panel.device)[:, None]
    column = torch.arange(columns, device=block.panel.device)
    if block.skip == "nothing":
        return torch.zeros_like(block.panel, dtype=torch.bool)
    return column == row if block.skip == "diagonal" else column <= row

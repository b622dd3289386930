"""What a block's scores say of a batch, beside any loss (fastsim/batch_metrics.py)."""

from dataclasses import replace

import torch

from fastsim.backends.torch.block import LEFT_OUT
from fastsim.batch_metrics import MAXIMA


def observe(block, seen):
    """Adds the scores of a block to the numbers of its rows, seen (R, len(SEEN)).

    The block stays as it is: what takes no part is left out of a copy of its panel.
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
    own = _own(block) & ~out
    negative = ~(own | out)
    sums = []
    for part in (negative, own):
        sums += [panel.masked_fill(~part, 0.0), part]
    sums += [by_id, out & ~by_id & ~skipped]
    highest = [panel.masked_fill(~part, LEFT_OUT).amax(1) for part in (negative, own)]
    maxima = torch.stack(highest, 1).to(seen.dtype)
    seen[:, :MAXIMA] = torch.maximum(seen[:, :MAXIMA], maxima)
    seen[:, MAXIMA:] += torch.stack([part.sum(1, dtype=seen.dtype) for part in sums], 1)


def _own(block):
    """(R, C) bool: the positive pairs, whether or not they take part."""
    if block.dense is not None:
        return block.dense > 0
    if block.row_groups is not None:
        return block.same
    own = torch.zeros_like(block.panel, dtype=torch.bool)
    if block.positives is not None:
        block.set_at_positives(own, True)
    return own


def _skipped(block):
    """(R, C) bool: the pairs that are nobody's candidates, by their indices."""
    rows, columns = block.panel.shape
    row = torch.arange(block.first, block.first + rows, device=block.panel.device)[:, None]
    column = torch.arange(columns, device=block.panel.device)
    if block.skip == "nothing":
        return torch.zeros_like(block.panel, dtype=torch.bool)
    return column == row if block.skip == "diagonal" else column <= row

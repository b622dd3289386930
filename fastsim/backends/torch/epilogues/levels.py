"""CoSENT over a matrix: sums of exponentials by level of the target."""

import torch

from fastsim.backends.bands import bands
from fastsim.backends.torch.block import LEFT_OUT, LOWEST
from fastsim.backends.torch.epilogues.base import Epilogue, block_zero, exp_relative, wide

FEW = 8  # levels that are looked at one after another; more are scattered


class Levels(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, levels = block.panel, tile.levels
        if block.dense is None:
            others = ~block.same
            block.fill(others, False)
            return self._one_by_one(tile, panel, (others, block.same))
        if len(levels) <= FEW:
            targets = block.dense.to(panel.dtype)
            masks = (block_zero(block, targets == level) for level in levels)
            return self._one_by_one(tile, panel, masks)
        return self._scattered(tile, block)

    @staticmethod
    def _one_by_one(tile, panel, masks):
        tops, totals = [], []
        for mask in masks:
            for side in (panel, panel.neg()):
                scores = side.masked_fill(~mask, LEFT_OUT)
                top = scores.amax().clamp_(min=LOWEST)
                tops.append(top)
                totals.append(*wide(exp_relative(scores, top, tile.scale, out=scores).sum(1)))
        top = torch.stack(tops).view(-1, 2).t()
        total = torch.stack(totals).sum(1).view(-1, 2).t()
        return [*wide(top), total]

    def _scattered(self, tile, block):
        sides = block.panel, block.panel.neg()
        block.fill(sides[1], LEFT_OUT)
        # As wide as what is made of a row: its scores, or its bins.
        wide_rows = block.panel[:, :1].expand(-1, max(block.panel.shape[1], len(tile.levels)))
        state = None
        for rows in bands(wide_rows):
            index = _index(tile, block.dense[rows], block.panel.dtype)
            found = _of_band(tile, index, [side[rows] for side in sides])
            state = found if state is None else tile.merge(tile.parts, state, found)
        return state

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        if block.dense is None:
            index = block.same.reshape(-1).to(torch.int32)
        else:
            index = _index(tile, block.dense, panel.dtype).reshape(-1)

        def of_pairs(values):
            return values.index_select(0, index).view(panel.shape)

        high, up, low, down = coefficients
        pull = exp_relative(panel.neg(), of_pairs(low), tile.scale).mul_(of_pairs(down))
        exp_relative(panel, of_pairs(high), tile.scale, out=panel).mul_(of_pairs(up)).sub_(pull)
        block.fill(panel, 0)


def _index(tile, targets, dtype):
    """(R, C) int32, the level of each target; scores have that dtype."""
    found = torch.searchsorted(tile.levels, targets.to(dtype).contiguous(), out_int32=True)
    return found.clamp_(max=len(tile.levels) - 1)


def _meet(device):
    """Whether numbers that go into one bin of a device wait for one another."""
    return device.type != "cpu"


def _of_band(tile, index, sides):
    """The state of some rows: index (R, C) their levels, sides: the scores and minus the scores.

    On a GPU each row has bins of its own, which are then added up.
    """
    apart = _meet(index.device)
    rows, count = index.shape[0] if apart else 1, len(tile.levels)
    bins = (index + count * torch.arange(rows, device=index.device)[:, None]).reshape(-1)
    found = []
    for side in sides:
        top = side.new_full((rows * count,), LOWEST)
        top.scatter_reduce_(0, bins, side.reshape(-1), "amax")
        top = top.view(rows, count).amax(0)
        (shares,) = wide(exp_relative(side, top[index], tile.scale).reshape(-1))
        total = shares.new_zeros(rows * count)
        if apart:  # in one order, as `index_add_` is not there
            total.index_put_((bins,), shares, accumulate=True)
        else:
            total.index_add_(0, bins, shares)
        found.append((*wide(top), total.view(rows, count).sum(0)))
    return list(map(torch.stack, zip(*found, strict=True)))

"""CoSENT over a matrix: sums of exponentials for each level of the target."""

import torch

from fastsim.backends.bands import bands
from fastsim.backends.torch.block import LEFT_OUT, LOWEST
from fastsim.backends.torch.epilogues.base import Epilogue, exp_relative, wide, zeroed

FEW = 8  # up to this many levels are summed one after another; more are scattered


class Levels(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, levels = block.panel, tile.levels
        if block.dense is None:
            others = ~block.same
            block.fill(others, False)
            return self._one_by_one(tile, panel, (others, block.same))
        if len(levels) <= FEW:
            targets = block.dense.to(panel.dtype)
            masks = (zeroed(block, targets == level) for level in levels)
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
        # As wide as the scores of a row or its bins, which a band has to hold.
        wide_rows = block.panel[:, :1].expand(-1, max(block.panel.shape[1], len(tile.levels)))
        state = None
        for rows in bands(wide_rows):
            index = _index(tile, block.dense[rows], block.panel.dtype)
            more = _of_band(tile, index, [side[rows] for side in sides])
            state = more if state is None else tile.merge(tile.parts, state, more)
        return state

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        if block.dense is None:
            index = block.same.reshape(-1).to(torch.int32)
        else:
            index = _index(tile, block.dense, panel.dtype).reshape(-1)

        def for_pairs(values):
            return values.index_select(0, index).view(panel.shape)

        high, up, low, down = coefficients
        pull = exp_relative(panel.neg(), for_pairs(low), tile.scale).mul_(for_pairs(down))
        exp_relative(panel, for_pairs(high), tile.scale, out=panel).mul_(for_pairs(up)).sub_(pull)
        block.fill(panel, 0)


def _index(tile, targets, dtype):
    """(R, C) int32: the level of each target; dtype: that of the scores."""
    index = torch.searchsorted(tile.levels, targets.to(dtype).contiguous(), out_int32=True)
    return index.clamp_(max=len(tile.levels) - 1)


def _contend(device):
    """Whether threads of a device wait for each other when they add to the same bin."""
    return device.type != "cpu"


def _of_band(tile, index, sides):
    """The state of a band of rows.

    index: (R, C) the levels of the pairs. sides: the scores and their negatives, both (R, C).
    On a GPU each row has its own bins, which are then added up.
    """
    apart = _contend(index.device)
    rows, count = index.shape[0] if apart else 1, len(tile.levels)
    bins = (index + count * torch.arange(rows, device=index.device)[:, None]).reshape(-1)
    pairs = []
    for side in sides:
        top = side.new_full((rows * count,), LOWEST)
        top.scatter_reduce_(0, bins, side.reshape(-1), "amax")
        top = top.view(rows, count).amax(0)
        (shares,) = wide(exp_relative(side, top[index], tile.scale).reshape(-1))
        total = shares.new_zeros(rows * count)
        if apart:  # in a fixed order; `index_add_` has none there
            total.index_put_((bins,), shares, accumulate=True)
        else:
            total.index_add_(0, bins, shares)
        pairs.append((*wide(top), total.view(rows, count).sum(0)))
    return list(map(torch.stack, zip(*pairs, strict=True)))

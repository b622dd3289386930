"""CoSENT over a matrix: sums of exponentials by level of the target."""

import torch

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
        count = len(tile.levels)
        index = self._index(tile, block).long()
        found = []
        for side in (block.panel, block.panel.neg()):
            block.fill(side, LEFT_OUT)
            scores = side.reshape(-1)
            top = scores.new_full((count,), LOWEST)
            top.scatter_reduce_(0, index, scores, "amax")
            shares = scores.sub(top[index]).mul_(tile.scale).exp_()
            (shares,) = wide(shares)
            total = shares.new_zeros(count)
            if total.device.type == "cpu":
                total.index_add_(0, index, shares)
            else:  # the same sums added up in one order
                total.index_put_((index,), shares, accumulate=True)
            found.append((*wide(top), total))
        return list(map(torch.stack, zip(*found, strict=True)))

    @staticmethod
    def _index(tile, block):
        """(R C,) the level of each pair."""
        if block.dense is None:
            return block.same.reshape(-1).to(torch.int32)
        targets = block.dense.to(block.panel.dtype).contiguous().reshape(-1)
        index = torch.searchsorted(tile.levels, targets, out_int32=True)
        return index.clamp_(max=len(tile.levels) - 1)

    def score_grad(self, tile, block, coefficients):
        panel, index = block.panel, self._index(tile, block)

        def of_pairs(values):
            return values.index_select(0, index).view(panel.shape)

        high, up, low, down = coefficients
        pull = exp_relative(panel.neg(), of_pairs(low), tile.scale).mul_(of_pairs(down))
        exp_relative(panel, of_pairs(high), tile.scale, out=panel).mul_(of_pairs(up)).sub_(pull)
        block.fill(panel, 0)

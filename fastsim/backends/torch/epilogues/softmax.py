"""Softmax over rows, over rows and columns, and over the negatives alone (decoupled)."""

import torch

from fastsim.backends.torch.block import LEFT_OUT
from fastsim.backends.torch.epilogues.base import (
    Epilogue,
    exp_relative,
    exponentials,
    narrowed,
    nonzero,
    wide,
)
from fastsim.precision import wide_dtype


class Softmax(Epilogue):
    def prepare(self, tile, block):
        if nonzero(tile.margin):
            block.add_at_positives(block.panel.new_ones(block.panel.shape[0], 1) * -tile.margin)

    def forward(self, tile, block, sums=None):
        panel, scale = block.panel, tile.scale
        rows = wide(*exponentials(panel, scale, 1))
        columns = wide(*exponentials(panel, scale, 0)) if tile.symmetric else []
        return [*rows, *self._target_sums(tile, block, None), *columns]

    def fused(self, tile, block, weights):
        if not tile.rows_alone:
            return super().fused(tile, block, weights)
        panel = block.panel
        targets = None if block.one_positive or block.untargeted else block.targets()
        target_sums = self._target_sums(tile, block, targets)
        state = [*wide(*exponentials(panel, tile.scale, 1, out=panel)), *target_sums]
        weights = weights.to(state[0].dtype)
        _, row_weight, target_weight, *_ = narrowed(tile.coefficients(state, weights), panel)
        panel.mul_(row_weight[:, None])
        self._subtract_targets(tile, block, target_weight, targets)
        return state

    def _target_sums(self, tile, block, targets):
        """sum_j t z and sum_j t of each row, both (R,)."""
        rows = block.panel.shape[0]
        if block.untargeted:
            # Two tensors: an operator returns both, and its results may not share memory.
            dtype = wide_dtype(block.panel.device)
            return [block.panel.new_zeros(rows, dtype=dtype) for _ in range(2)]
        if block.one_positive:
            (scores,) = wide(block.at_positives()[:, 0])
            count = torch.ones_like(scores)
            if not block.whole:
                count = torch.where(block.inside[:, 0], count, 0.0)
            return [tile.scale * scores, count]
        targets = block.targets() if targets is None else targets
        products, count = wide((targets * block.panel).sum(1), targets.sum(1))
        return [tile.scale * products, count]

    def score_grad(self, tile, block, coefficients):
        panel, scale = block.panel, tile.scale
        top, row_weight, target_weight, column_top, column_weight = coefficients
        across = None
        if column_top is not None:
            across = exp_relative(panel, column_top, scale).mul_(column_weight)
        exp_relative(panel, top[:, None], scale, out=panel).mul_(row_weight[:, None])
        if across is not None:
            panel.add_(across)
            del across
        self._subtract_targets(tile, block, target_weight, None)

    def _subtract_targets(self, tile, block, weights, targets):
        """Subtracts weights (R,) times the targets from the score gradients."""
        if block.untargeted:
            return
        if block.one_positive:
            block.add_at_positives(-weights[:, None])
            return
        targets = block.targets() if targets is None else targets
        block.panel.addcmul_(targets, weights[:, None], value=-1)


class Decoupled(Epilogue):
    def forward(self, tile, block, sums=None):
        scores, (positive,) = block.panel.clone(), wide(block.at_positives()[:, 0])
        return [*self._negative_sums(tile, block, scores), tile.scale * positive]

    def fused(self, tile, block, weights):
        panel, (positive,) = block.panel, wide(block.at_positives()[:, 0])
        state = [*self._negative_sums(tile, block, panel), tile.scale * positive]
        coefficients = tile.coefficients(state, weights.to(state[0].dtype))
        _, row_weight, positive_weight = narrowed(coefficients, panel)
        panel.mul_(row_weight[:, None])
        block.add_at_positives(-positive_weight[:, None])
        return state

    @staticmethod
    def _negative_sums(tile, block, scores):
        """(maxima, sums); turns the scores into their exponentials, 0 at the positives."""
        block.set_at_positives(scores, LEFT_OUT)
        return wide(*exponentials(scores, tile.scale, 1, out=scores))

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, row_weight, positive_weight = coefficients
        block.set_at_positives(panel, LEFT_OUT)
        exp_relative(panel, top[:, None], tile.scale, out=panel).mul_(row_weight[:, None])
        block.add_at_positives(-positive_weight[:, None])

"""Softmax over a row, over a column too, and over the negatives alone (decoupled)."""

import torch

from fastsim.backends.torch.block import LEFT_OUT
from fastsim.backends.torch.epilogues.base import (
    Epilogue,
    exp_relative,
    exponentials,
    given,
    narrowed,
    wide,
)
from fastsim.precision import wide_dtype


class Softmax(Epilogue):
    def prepare(self, tile, block):
        if given(tile.margin):
            block.add_at_positives(block.panel.new_ones(block.panel.shape[0], 1) * -tile.margin)

    def forward(self, tile, block, sums=None):
        panel, scale = block.panel, tile.scale
        rows = wide(*exponentials(panel, scale, 1))
        columns = wide(*exponentials(panel, scale, 0)) if tile.symmetric else []
        return [*rows, *self._of_targets(tile, block, None), *columns]

    def fused(self, tile, block, weights):
        if not tile.rows_alone:
            return super().fused(tile, block, weights)
        panel = block.panel
        targets = None if block.one_positive or block.untargeted else block.targets()
        of_targets = self._of_targets(tile, block, targets)
        state = [*wide(*exponentials(panel, tile.scale, 1, out=panel)), *of_targets]
        weights = weights.to(state[0].dtype)
        _, of_row, of_target, *_ = narrowed(tile.coefficients(state, weights), panel)
        panel.mul_(of_row[:, None])
        self._take_targets(tile, block, of_target, targets)
        return state

    def _of_targets(self, tile, block, targets):
        """(sum_j t z, sum_j t) by rows."""
        rows = block.panel.shape[0]
        if block.untargeted:
            # Two tensors: an operator returns both, and no two of its results may share memory.
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
        top, of_row, of_target, column_top, of_column = coefficients
        of_columns = None
        if column_top is not None:
            of_columns = exp_relative(panel, column_top, scale).mul_(of_column)
        exp_relative(panel, top[:, None], scale, out=panel).mul_(of_row[:, None])
        if of_columns is not None:
            panel.add_(of_columns)
            del of_columns
        self._take_targets(tile, block, of_target, None)

    def _take_targets(self, tile, block, weights, targets):
        """Takes weights (R,) times the targets from the score gradients."""
        if block.untargeted:
            return
        if block.one_positive:
            block.add_at_positives(-weights[:, None])
            return
        targets = block.targets() if targets is None else targets
        block.panel.addcmul_(targets, weights[:, None], value=-1)


class Decoupled(Epilogue):
    def forward(self, tile, block, sums=None):
        scores, (own,) = block.panel.clone(), wide(block.at_positives()[:, 0])
        return [*self._of_negatives(tile, block, scores), tile.scale * own]

    def fused(self, tile, block, weights):
        panel, (own,) = block.panel, wide(block.at_positives()[:, 0])
        state = [*self._of_negatives(tile, block, panel), tile.scale * own]
        coefficients = tile.coefficients(state, weights.to(state[0].dtype))
        _, of_row, of_positive = narrowed(coefficients, panel)
        panel.mul_(of_row[:, None])
        block.add_at_positives(-of_positive[:, None])
        return state

    @staticmethod
    def _of_negatives(tile, block, scores):
        """(maxima, sums); of the scores their exponentials remain, 0 at the positives."""
        block.set_at_positives(scores, LEFT_OUT)
        return wide(*exponentials(scores, tile.scale, 1, out=scores))

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, of_row, of_positive = coefficients
        block.set_at_positives(panel, LEFT_OUT)
        exp_relative(panel, top[:, None], tile.scale, out=panel).mul_(of_row[:, None])
        block.add_at_positives(-of_positive[:, None])

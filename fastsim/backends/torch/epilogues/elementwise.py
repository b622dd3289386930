"""Losses that are sums over pairs: sigmoid and squared error."""

import torch
from torch.nn.functional import softplus

from fastsim.backends.torch.epilogues.base import Epilogue, wide, zeroed


class Sigmoid(Epilogue):
    def forward(self, tile, block, sums=None):
        logits, labels = self._logits(tile, block, out=None)
        losses = self._losses(block, logits, labels)
        score_grads = self._score_grads(block, logits, labels)
        return wide(losses, score_grads.sum(1))

    def score_grad(self, tile, block, coefficients):
        logits, labels = self._logits(tile, block, out=block.panel)
        self._score_grads(block, logits, labels)
        block.panel.mul_((coefficients[0] * tile.scale)[:, None])

    def fused(self, tile, block, weights):
        logits, labels = self._logits(tile, block, out=block.panel)
        losses = self._losses(block, logits, labels)
        score_grads = self._score_grads(block, logits, labels)
        state = wide(losses, score_grads.sum(1))
        score_grads.mul_((weights.to(score_grads.dtype) * tile.scale)[:, None])
        return state

    @staticmethod
    def _logits(tile, block, out):
        logits = torch.mul(block.panel, tile.scale, out=out).add_(tile.bias)
        return logits, block.targets().add_(1).mul_(0.5)

    @staticmethod
    def _losses(block, logits, labels):
        """(R,) sum_j max(z, 0) - label z + log(1 + e^-|z|), in which nothing cancels."""
        losses = softplus(logits.abs().neg_())
        # First max(z, 0) - label z: added alone, z would take the digits of a logarithm near 0.
        losses.add_(logits.clamp(min=0).addcmul_(labels, logits, value=-1))
        return zeroed(block, _weighed(block, losses, labels)).sum(1)

    @staticmethod
    def _score_grads(block, logits, labels):
        """sigma(z) - label as (1 - label) sigma(z) - label sigma(-z), which does not cancel."""
        complements = logits.neg().sigmoid_()
        score_grads = logits.sigmoid_()
        score_grads.addcmul_(score_grads, labels, value=-1)
        score_grads.addcmul_(complements, labels, value=-1)
        return zeroed(block, _weighed(block, score_grads, labels))


def _weighed(block, matrix, labels):
    """Multiplies the positives (label 1, others 0) of a matrix by the weights of their rows."""
    if block.positive_weights is None:
        return matrix
    return matrix.mul_(torch.where(labels > 0, block.positive_weights[:, None], 1.0))


class SquaredError(Epilogue):
    def forward(self, tile, block, sums=None):
        return self._losses(self._differences(block, None))

    def score_grad(self, tile, block, coefficients):
        self._differences(block, block.panel).mul_(2 * coefficients[0][:, None])

    def fused(self, tile, block, weights):
        state = self._losses(self._differences(block, block.panel))
        block.panel.mul_(2 * weights.to(block.panel.dtype)[:, None])
        return state

    @staticmethod
    def _differences(block, out):
        return zeroed(block, torch.sub(block.panel, block.targets(), out=out))

    @staticmethod
    def _losses(differences):
        return wide(differences.square().sum(1))

"""Sums over positives and over negatives: multi-similarity, circle, debiased, multi-positive."""

import torch
from torch.nn.functional import softplus

from fastsim.backends.torch.block import LEFT_OUT
from fastsim.backends.torch.epilogues.base import (
    Epilogue,
    exp_relative,
    exponentials,
    nonzero,
    wide,
)

SOFTPLUS_LINEAR = 50.0  # from here on softplus(x) is x, in double precision too


class MultiSimilarity(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same = block.panel, block.same
        scores = panel.masked_fill(same, LEFT_OUT)
        negatives = exponentials(scores, tile.scale, 1, out=scores)
        torch.neg(panel, out=scores).masked_fill_(~same, LEFT_OUT)
        return wide(*negatives, *exponentials(scores, tile.positive_scale, 1, out=scores))

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, weight, positive_top, positive_weight = (c[:, None] for c in coefficients)
        positives = exp_relative(panel.neg(), positive_top, tile.positive_scale)
        positives.mul_(-positive_weight)
        exp_relative(panel, top, tile.scale, out=panel).mul_(weight)
        torch.where(block.same, positives, panel, out=panel)


class Debiased(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same = block.panel, block.same
        scores = panel.masked_fill(same, LEFT_OUT)
        weights = exponentials(scores, tile.weight_scale, 1) if nonzero(tile.hardness) else ()
        negatives = exponentials(scores, tile.hard_scale, 1, out=scores)
        torch.neg(panel, out=scores).masked_fill_(~same, LEFT_OUT)
        return wide(*negatives, *exponentials(scores, tile.scale, 1, out=scores), *weights)

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        vectors = (c if c is None else c[:, None] for c in coefficients)
        top, weight, positive_top, positive_weight, weight_top, other_weight = vectors
        positives = exp_relative(panel.neg(), positive_top, tile.scale).mul_(-positive_weight)
        if nonzero(tile.hardness):
            positives.masked_fill_(~block.same, 0)
            others = exp_relative(panel, weight_top, tile.weight_scale).mul_(other_weight)
            others = others.masked_fill_(block.same, 0)
            block.fill(others, 0)
            positives.sub_(others)
            del others
        exp_relative(panel, top, tile.hard_scale, out=panel).mul_(weight)
        if nonzero(tile.hardness):
            panel.masked_fill_(block.same, 0).add_(positives)
        else:
            torch.where(block.same, positives, panel, out=panel)


class Circle(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same, margin = block.panel, block.same, tile.margin
        rising = _raised(panel, margin).mul_(panel - margin).masked_fill_(same, LEFT_OUT)
        block.fill(rising, LEFT_OUT)
        negatives = exponentials(rising, tile.scale, 1, out=rising)
        falling = _lowered(panel, margin).mul_(1 - margin - panel).masked_fill_(~same, LEFT_OUT)
        return wide(*negatives, *exponentials(falling, tile.scale, 1, out=falling))

    def score_grad(self, tile, block, coefficients):
        panel, margin = block.panel, tile.margin
        top, weight, positive_top, positive_weight = (c[:, None] for c in coefficients)
        lowered, raised = _lowered(panel, margin), _raised(panel, margin)
        falling = lowered * (1 - margin - panel)
        positives = exp_relative(falling, positive_top, tile.scale, out=falling)
        positives.mul_(lowered).mul_(-positive_weight)
        rising = panel.sub_(margin).mul_(raised)
        exp_relative(rising, top, tile.scale, out=rising).mul_(raised).mul_(weight)
        torch.where(block.same, positives, panel, out=panel)
        block.fill(panel, 0)


def _raised(scores, margin):
    """The weight of a negative."""
    return (scores + margin).relu_()


def _lowered(scores, margin):
    """The weight of a positive."""
    return (1 + margin - scores).relu_()


class MultiPositive(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same = block.panel, block.same
        if sums is None:
            scores = panel.masked_fill(same, LEFT_OUT)
            sums = wide(*exponentials(scores, tile.scale, 1, out=scores))
        top, total = sums
        terms = self._terms(tile, panel, top, total.log())
        losses = softplus(terms, threshold=SOFTPLUS_LINEAR).masked_fill_(~same, 0).sum(1)
        score_grads = terms.sigmoid_().masked_fill_(~same, 0).sum(1)
        return [*sums, *wide(losses, score_grads)]

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, weight, log_total, positive_weight = coefficients
        positives = self._terms(tile, panel, top, log_total).sigmoid_()
        positives.mul_(-positive_weight[:, None])
        exp_relative(panel, top[:, None], tile.scale, out=panel).mul_(weight[:, None])
        torch.where(block.same, positives, panel, out=panel)

    @staticmethod
    def _terms(tile, panel, top, log_total):
        """scale (top - s) + log_total."""
        top, log_total = (part.to(panel.dtype)[:, None] for part in (top, log_total))
        return torch.sub(top, panel).mul_(tile.scale).add_(log_total)

"""Positives against negatives by groups: multi-similarity, NT-Xent with any number of positives,
and circle loss.
"""

import torch

from fastsim.kinds.kind import ROWS, Exponentials, Kind, Total, over
from fastsim.reduce import softplus


class MultiSimilarity(Kind):
    """softplus(lse of scale (s_n - base)) / scale + softplus(lse of a (base - s_p)) / a.

    a is `positive_scale`. State: top and sum of exponentials of the negatives' scores, and of the
    negated positives'.
    """

    name = "multi_similarity"
    state = Exponentials(), Exponentials(scale="positive_scale")
    parameters = ("scale", "positive_scale")
    learns = ()
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)

    def finish(self, tile, state):
        return sum(
            torch.where(total == 0, 0.0, softplus(lse) / scale)
            for _, total, lse, scale in self._sums(tile, state)
        )

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of exp(scale (s - top)) of the negatives, and of the
        positives.
        """
        return tuple(
            part
            for top, total, lse, _ in self._sums(tile, state)
            for part in (top, over(grad * lse.sigmoid(), total))
        )

    def largest_score_grad(self, tile, weights, columns):
        return weights.amax()

    def _sums(self, tile, state):
        """For negatives and positives: top, sum, lse of the logits, scale."""
        sides = (tile.scale, -tile.base, state[:2]), (tile.positive_scale, tile.base, state[2:])
        for scale, shift, (top, sums) in sides:
            yield top, sums, scale * (top + shift) + sums.log(), scale


class MultiPositive(Kind):
    """sum_p softplus(lse_n z_n - z_p), z = scale s.

    State: top and sum of exponentials of the negatives; sum_p loss, -sum_p dloss/dz of the
    positives, which need the negatives of the whole row.
    """

    name = "multi_positive"
    state = Exponentials(), Total(needs_row=True), Total(needs_row=True)
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)

    def finish(self, tile, state):
        return state[2]

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of the negatives, log of their sum, weight of a positive."""
        top, total, _, score_grads = state
        weight = grad * tile.scale
        return (
            top,
            over(weight * score_grads, total),
            total.log(),
            torch.where(total == 0, 0.0, weight),
        )

    def largest_score_grad(self, tile, weights, columns):
        # Of a negative: a share of the score gradients of as many positives as there are columns.
        return weights.amax() * tile.scale.abs() * columns


class Circle(Kind):
    """softplus(lse_p scale v_p + lse_n scale u_n) with u = relu(s + margin) (s - margin).

    v = relu(1 + margin - s) (1 - margin - s); the gradient takes the two relus for constants.
    State: top and sum of exponentials of the negatives' u, and of the positives' v.
    """

    name = "circle"
    state = Exponentials(), Exponentials()
    parameters = ("scale", "margin")
    learns = ()
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)

    def finish(self, tile, state):
        return torch.nn.functional.softplus(self._sum(tile, state))

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of exp(scale (u - top)) of the negatives, of the positives' v."""
        top, total, positive_top, positive_total = state
        weight = grad * tile.scale * self._sum(tile, state).sigmoid()
        return top, over(weight, total), positive_top, over(weight, positive_total)

    def largest_score_grad(self, tile, weights, columns):
        # A share of scale times one of the relus, which for a cosine is at most 2 + margin.
        return weights.amax() * abs(tile.scale) * (2 + abs(tile.margin))

    def _sum(self, tile, state):
        """The sum of both log-sum-exps, -inf where one of them has no terms."""
        top, total, positive_top, positive_total = state
        return tile.scale * (top + positive_top) + total.log() + positive_total.log()


KINDS = (MultiSimilarity(), MultiPositive(), Circle())

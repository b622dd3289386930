"""Levels: CoSENT over all entries of the matrix, with the K distinct targets as levels.

L = lse(0, {B_l + lse_{m<l} A_m}),   A_l = lse of z in level l,   B_l = lse of -z,   z = scale s
"""

import torch

from fastsim.kinds.kind import MATRIX, Exponentials, Kind


class Levels(Kind):
    """State: per level the maximum of s and of -s, (2, K), and the sums of exponentials relative to
    them, (2, K).
    """

    name = "levels"
    state = (Exponentials(MATRIX),)
    coefficient_axes = (MATRIX, MATRIX, MATRIX, MATRIX)
    weights_at = (1, 3)
    whole_matrix = True

    def finish(self, tile, state):
        _, _, pairs, reach = _sums(tile, state)
        return torch.logaddexp(reach + pairs, torch.zeros_like(pairs))

    def coefficients(self, tile, state, grad):
        """Per level: high, up, low, down of csrc/epilogue.h, with dL/dloss and the scale inside."""
        (up, down), shift, pairs, reach = _sums(tile, state)
        none = up.new_full((1,), -torch.inf)
        above = torch.cat([torch.logcumsumexp(down.flip(0), 0).flip(0)[1:], none])
        below = torch.cat([none, torch.logcumsumexp(up, 0)[:-1]])
        loss = torch.logaddexp(pairs, -reach)
        (high, low), total = state
        factors = (shift + torch.stack([above, below]) - loss).exp() * (grad * tile.scale)
        factors = torch.where(total == 0, 0.0, factors)
        return high, factors[0], low, factors[1]

    def largest_score_grad(self, tile, weights, columns):
        # An entry's share of all pairs as the lower, less that as the higher: 1 where one pair is
        # all of the loss, and far less of a large matrix, as `largest_of` knows.
        return weights.amax() * tile.scale.abs()


def _sums(tile, state):
    """A_l and B_l (2, K), their shifts, lse of {B_l + lse_{m<l} A_m}, and what was taken out.

    All relative to the extremes of the whole matrix, so that no large number is rounded: A is
    less by scale * max s, B by scale * max -s, the pairs by `reach`, the sum of both.
    """
    top, total = state
    most = top.amax(1, keepdim=True)
    shift = tile.scale * (top - most)
    sums = total.log() + shift
    up, down = sums
    pairs = torch.logsumexp(down[1:] + torch.logcumsumexp(up, 0)[:-1], 0)
    return sums, shift, pairs, tile.scale * most.sum()


KINDS = (Levels(),)

"""Levels: CoSENT over all entries of the matrix. The K distinct targets are the levels.

L = lse(0, {B_l + lse_{m<l} A_m}),   A_l = lse of z in level l,   B_l = lse of -z,   z = scale s
"""

import torch

from fastsim.kinds.kind import MATRIX, Exponentials, Kind


class Levels(Kind):
    """State: (2, K) the maximum of s and of -s in each level, and (2, K) the sums of exponentials
    relative to them.
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
        """Per level: high, up, low, down of csrc/epilogue.h, times dL/dloss and the scale."""
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
        # The share of the pairs in which an entry is the lower, less that in which it is the
        # higher: 1 if one pair is the whole loss, far less in a large matrix (`largest_of`).
        return weights.amax() * tile.scale.abs()


def _sums(tile, state):
    """(sums, shift, pairs, reach), all relative to the extremes of the whole matrix, so that no
    large number is rounded.

    sums: (2, K) A_l - scale max s and B_l - scale max -s.
    shift: (2, K) scale (maximum of the level - maximum of the matrix), for s and for -s.
    pairs: () lse of {B_l + lse_{m<l} A_m}, less reach.
    reach: () scale (max s + max -s).
    """
    top, total = state
    most = top.amax(1, keepdim=True)
    shift = tile.scale * (top - most)
    sums = total.log() + shift
    up, down = sums
    pairs = torch.logsumexp(down[1:] + torch.logcumsumexp(up, 0)[:-1], 0)
    return sums, shift, pairs, tile.scale * most.sum()


KINDS = (Levels(),)

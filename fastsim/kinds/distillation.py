"""Distillation: the softmax of a row's scores should match that of its targets, a teacher's scores.

L_i = sum_j p_ij (log p_ij - log q_ij),   q_i = softmax_j(scale s_ij)
p_i = softmax_j(positive_scale t_ij)
"""

from dataclasses import dataclass

import torch

from fastsim.kinds.kind import ROWS, Exponentials, Kind, StatePart, over
from fastsim.precision import rounded_off


@dataclass(frozen=True)
class TeacherSums(StatePart):
    """The maximum `top` of the targets t, and three sums over e = exp(positive_scale (t - top)):
    of e, of e scale s, and of e positive_scale t.
    """

    size = 4
    fills = (*Exponentials.fills, 0.0, 0.0)

    def merge(self, tile, one, other):
        both, before, here = self._factors(tile, one, other)
        sums = (a * before + b * here for a, b in zip(one[1:], other[1:], strict=True))
        return [both, *sums]

    def lost(self, tile, one, other, both):
        _, before, here = self._factors(tile, one, other)
        sums = zip(one[1:], other[1:], both[1:], strict=True)
        return [
            (0.0, 0.0),
            *((rounded_off(a * before, b * here, total), before) for a, b, total in sums),
        ]

    @staticmethod
    def _factors(tile, one, other):
        both = torch.maximum(one[0], other[0])
        return both, *((tile.positive_scale * (side[0] - both)).exp() for side in (one, other))


class Distillation(Kind):
    """State: top and sum of exponentials of the scores; `TeacherSums`."""

    name = "distillation"
    state = Exponentials(), TeacherSums()
    parameters = ("scale", "positive_scale")
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)
    weights_at = (1, 3)

    def finish(self, tile, state):
        top, total, teacher_top, teacher_total, own_logits, teacher_logits = state
        lse = tile.scale * top + total.log()
        teacher_lse = tile.positive_scale * teacher_top + teacher_total.log()
        return lse - teacher_lse + (teacher_logits - own_logits) / teacher_total

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of exp(scale (s - top)), and of exp(positive_scale (t - top))."""
        top, total, teacher_top, teacher_total, *_ = state
        weight = grad * tile.scale
        return top, over(weight, total), teacher_top, over(weight, teacher_total)

    def largest_score_grad(self, tile, weights, columns):
        # The difference of two probabilities.
        return weights.amax() * abs(tile.scale)


class Margins(Kind):
    """L_i = sum_j (d_p - d_j)^2, p the column of the positive, d_j = s_j - positive_scale t_j.

    It keeps no state, as it is only computed in one call (`Backend.in_one_call`). For larger
    matrices, fastsim/losses/distill.py uses a squared error and a term of the positives instead.
    """

    name = "margins"
    parameters = ("positive_scale",)
    learns = ()
    in_panels = False


KINDS = (Distillation(), Margins())

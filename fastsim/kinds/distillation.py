"""Distillation: the softmax of a row's scores is to be that of its targets, a teacher's scores.

L_i = sum_j p_ij (log p_ij - log q_ij),   q_i = softmax_j(scale s_ij)
p_i = softmax_j(positive_scale t_ij)
"""

from dataclasses import dataclass

import torch

from fastsim.kinds.kind import ROWS, Exponentials, Kind, StatePart, over
from fastsim.precision import rounded_off


@dataclass(frozen=True)
class TeacherSums(StatePart):
    """The maximum of the targets and, of exp(positive_scale (t - top)), the sum, the sum of its
    products with scale s, and with positive_scale t.
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
    """State: top and sum of exponentials of the scores; the sums of the teacher."""

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
        """Per row: top and weight of exp(scale (s - top)), those of the teacher's."""
        top, total, teacher_top, teacher_total, *_ = state
        weight = grad * tile.scale
        return top, over(weight, total), teacher_top, over(weight, teacher_total)

    def largest_score_grad(self, tile, weights, columns):
        # A probability less another.
        return weights.amax() * abs(tile.scale)


class Margins(Kind):
    """L_i = sum_j (d_p - d_j)^2 of the positive's column p, d_j = s_j - positive_scale t_j.

    Of a matrix that a backend serves in one call (`Backend.whole`), so it keeps no state. Larger
    ones are a squared error and what the positives add to it (fastsim/losses/distill.py).
    """

    name = "margins"
    parameters = ("positive_scale",)
    learns = ()
    in_panels = False


KINDS = (Distillation(), Margins())

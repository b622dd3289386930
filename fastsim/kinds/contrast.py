"""Losses of positives against negatives: multi-similarity, NT-Xent with any number of positives,
circle loss, decoupled and debiased contrastive loss.
"""

from typing import NamedTuple

import torch

from fastsim.kinds.kind import ROWS, Exponentials, Kind, OfPositive, Total, over
from fastsim.pairs import equal_counts
from fastsim.reduce import softplus


class MultiSimilarity(Kind):
    """softplus(lse of scale (s_n - base)) / scale + softplus(lse of a (base - s_p)) / a.

    a is `positive_scale`. State: top and sum of exponentials for the scores of the negatives, and
    for the negated scores of the positives.
    """

    name = "multi_similarity"
    state = Exponentials(), Exponentials(scale="positive_scale")
    parameters = ("scale", "positive_scale")
    learns = ()
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)
    weights_at = (1, 3)

    def finish(self, tile, state):
        return sum(softplus(lse) / scale for _, _, lse, scale in self._sums(tile, state))

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of exp(scale (s - top)) for the negatives, then for the
        positives with scale a and -s.
        """
        return tuple(
            part
            for top, total, lse, _ in self._sums(tile, state)
            for part in (top, over(grad * lse.sigmoid(), total))
        )

    def largest_score_grad(self, tile, weights, columns):
        return weights.amax()

    def _sums(self, tile, state):
        """Yields (top, sum, lse of the logits, scale) of the negatives, then of the positives."""
        sides = (tile.scale, -tile.base, state[:2]), (tile.positive_scale, tile.base, state[2:])
        for scale, shift, (top, sums) in sides:
            yield top, sums, scale * (top + shift) + sums.log(), scale


class MultiPositive(Kind):
    """sum_p softplus(lse_n z_n - z_p), z = scale s.

    State: top and sum of exponentials of the negatives; sum_p loss and -sum_p dloss/dz_p over the
    positives, which need the negatives of the whole row.
    """

    name = "multi_positive"
    state = Exponentials(), Total(needs_row=True), Total(needs_row=True)
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)
    weights_at = (1, 3)

    def finish(self, tile, state):
        _, total, losses, _ = state
        return losses + 0 * total  # passes on a NaN of the negatives

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
        # That of a negative is a share of the sum over the positives of its row.
        return weights.amax() * tile.scale.abs() * _most_positives(tile.pairs, columns)


class Circle(Kind):
    """softplus(lse_p scale v_p + lse_n scale u_n) with u = relu(s + margin) (s - margin).

    v = relu(1 + margin - s) (1 - margin - s). The gradient treats both relus as constants.
    State: top and sum of exponentials for u of the negatives, and for v of the positives.
    """

    name = "circle"
    state = Exponentials(), Exponentials()
    parameters = ("scale", "margin")
    learns = ()
    coefficient_axes = (ROWS, ROWS, ROWS, ROWS)
    weights_at = (1, 3)

    def finish(self, tile, state):
        return softplus(self._sum(tile, state))

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of exp(scale (u - top)) for the negatives, then with v for the
        positives.
        """
        top, total, positive_top, positive_total = state
        weight = grad * tile.scale * self._sum(tile, state).sigmoid()
        return top, over(weight, total), positive_top, over(weight, positive_total)

    def largest_score_grad(self, tile, weights, columns):
        # dL/ds is a share of scale times a relu.
        return weights.amax() * abs(tile.scale) * self._steepest(tile)

    def largest_of(self, tile, coefficients, columns):
        return super().largest_of(tile, coefficients, columns) * self._steepest(tile)

    @staticmethod
    def _steepest(tile):
        """An upper bound of both relus if s is a cosine."""
        return 2 + abs(tile.margin)

    def _sum(self, tile, state):
        """The sum of both log-sum-exps, -inf if one of them has no terms."""
        top, total, positive_top, positive_total = state
        return tile.scale * (top + positive_top) + total.log() + positive_total.log()


class Decoupled(Kind):
    """lse_n z_n - z_p, z = scale s, with one positive p and at least one negative for each row.

    -inf if all negatives have the score -inf. State: top and sum of exponentials of the negatives;
    the logit of the positive.
    """

    name = "decoupled"
    state = Exponentials(), OfPositive()
    coefficient_axes = (ROWS, ROWS, ROWS)
    weights_at = (1, 2)

    def finish(self, tile, state):
        top, total, positive = state
        return tile.scale * top + total.log() - positive

    def coefficients(self, tile, state, grad):
        """Per row: top and weight of exp(scale (s - top)) for the negatives; weight of the
        positive.
        """
        top, total, _ = state
        weight = grad * tile.scale
        return top, weight / total, weight  # NaN for a total of 0, as the formula's gradient

    def largest_score_grad(self, tile, weights, columns):
        return weights.amax() * tile.scale.abs()


class DebiasedRow(NamedTuple):
    """Quantities from which the loss of each row follows, all (N,).

    none: whether the row has no negative.
    low: whether N is at its minimum K e^-scale.
    both: log(R e^-z_p).
    least: log(K e^-scale e^-z_p).
    prior: q.
    share: dL/d log R if N is not at its minimum.
    """

    none: torch.Tensor
    low: torch.Tensor
    both: torch.Tensor
    least: torch.Tensor
    prior: torch.Tensor
    share: torch.Tensor


class Debiased(Kind):
    """log(1 + N e^-z_p), z = scale s, N from sums of exponentials of the negatives.

    With K negatives, the prior probability q that a negative is in fact a positive, and hardness h:
    N = max((R - q K e^z_p) / (1 - q), K e^-scale), R = K sum_n e^((1 + h) z_n) / sum_n e^(h z_n).
    State: top and sum of exponentials of the negatives with scale (1 + h); of the negated positive;
    with hardness, of the negatives with scale h.
    """

    name = "debiased"
    state = Exponentials(scale="hard_scale"), Exponentials()
    state_of_weights = (Exponentials(scale="weight_scale"),)
    parameters = ("scale", "hardness")
    coefficient_axes = (ROWS,) * 6
    weights_at = (1, 3, 5)

    def parts(self, tile):
        return self.state + self.state_of_weights if tile.hardness else self.state

    def finish(self, tile, state):
        row = self._row(tile, state)
        losses = row.both - row.share.log() - torch.log1p(-row.prior)
        losses = torch.where(row.prior == 0, softplus(row.both), losses)
        losses = torch.where(row.low, softplus(row.least), losses)
        return torch.where(row.none, 0 * state[3], losses)  # passes on a NaN of the positive

    def coefficients(self, tile, state, grad):
        """Per row: top and weight for the negatives; for the positive; with hardness, for the
        negatives at `weight_scale`, otherwise two Nones.
        """
        top, total, positive_top, positive_total, *of_weights = state
        row = self._row(tile, state)
        # dL/d log R and -dL/dz_p.
        of_negatives = grad * row.share.masked_fill(row.low, 0.0)
        of_positive = torch.where(row.low, row.least.sigmoid(), row.share)
        of_positive.masked_fill_(row.none, 0.0)
        positive = over(tile.scale * grad * of_positive, positive_total)
        both = top, over(tile.hard_scale * of_negatives, total), positive_top, positive
        if not tile.hardness:
            return *both, None, None
        weight_top, weight_total = of_weights
        return *both, weight_top, over(tile.weight_scale * of_negatives, weight_total)

    def largest_score_grad(self, tile, weights, columns):
        largest = weights.amax() * abs(tile.scale) * (1 + 2 * tile.hardness)
        if tile.prior is None:
            return largest
        prior, count = tile.prior.unbind(1)
        return largest * (prior * count / (1 - prior)).amax().clamp(min=1)

    def scale_gradient(self, tile, state, grad):
        """The share of the rows with N at its minimum K e^-scale."""
        row = self._row(tile, state)
        return -(grad * row.least.sigmoid()).masked_fill_(~row.low, 0.0).sum()

    def _row(self, tile, state):
        """The `DebiasedRow` of the state."""
        top, total, positive_top, positive_total, *of_weights = state
        pull = tile.scale * positive_top + positive_total.log()
        push = tile.hard_scale * top + total.log()
        if tile.prior is None:
            prior, count = torch.zeros_like(top), torch.ones_like(top)
        else:
            prior, count = tile.prior.to(top.dtype).unbind(1)
        log_count = count.log()
        if tile.hardness:
            weight_top, weight_total = of_weights
            push = push + log_count - tile.weight_scale * weight_top - weight_total.log()
        both, least = push + pull, log_count - tile.scale + pull
        # 1 + N e^-z_p = (e^both + rest) / (1 - q)
        expected = prior * count
        share = 1 / (1 + (1 - prior - expected) * (-both).exp())
        if tile.prior is None:
            low = torch.zeros_like(both, dtype=torch.bool)
        else:  # False for NaN, which then reaches the loss
            low = both < torch.logaddexp(least + torch.log1p(-prior), expected.log())
        return DebiasedRow(total == 0, low, both, least, prior, share)


def _most_positives(pairs, columns):
    """A bound on the number of positives of a row: the size of the largest group."""
    if pairs.sliced:  # the other columns of a group may be elsewhere
        return columns
    return equal_counts(pairs.column_groups, pairs.column_groups).amax()


KINDS = (MultiSimilarity(), MultiPositive(), Circle(), Decoupled(), Debiased())

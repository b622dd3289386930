"""The tile losses between the passes: from what a forward reduction leaves to losses and score
gradient coefficients.

State by kind, as a backend's `forward` and `fused_pass` return it, float64, (N,) unless said
otherwise:
softmax: the row's maximum score `top`, sum_j exp(scale (s - top)), sum_j t z, sum_j t; if symmetric
    also top and sum of each column (M,). An empty row or column has sum 0.
sigmoid: sum_j loss, sum_j dloss/dz.
squared_error: sum_j loss.
multi_similarity: of the negatives the maximum score and sum_j exp(scale (s - top)); of the
    positives the maximum of -s, and the sum with positive_scale.
multi_positive: of the negatives the maximum score and sum_j exp(scale (s - top)); of the positives
    sum_j loss, -sum_j dloss/dz.
levels: per level the maximum of s and of -s, (2, K), and the sums of exponentials relative to them,
    (2, K). A level without entries has sum 0.
Logits are z = scale * s (+ bias); a softmax takes `margin` from the positive's score first.
"""

from dataclasses import dataclass

import torch

from fastsim.distributed import all_reduce_sum, merge_exponentials
from fastsim.pairs import Pairs


@dataclass(frozen=True)
class Tile:
    """A tile loss: its kind, its pairs and its parameters.

    normalise: divide each row's targets by their sum, a row without any contributing 0 (SupCon).
    symmetric: the mean of the row softmax and the column softmax of the positives.
    levels: (K,) ascending distinct target values in the compute type.
    group: the name of the process group whose ranks hold the rows, where the loss keeps more than
        its rows' own state; "" for a loss of one process or of rows alone.
    positive_scale: of the logits of positives, where they have one of their own.
    cosine: the scores are cosines; else the products of the rows as they are.
    """

    kind: str
    pairs: Pairs
    scale: float = 1.0
    bias: float = 0.0
    margin: float = 0.0
    normalise: bool = False
    symmetric: bool = False
    levels: torch.Tensor | None = None
    group: str = ""
    positive_scale: float = 1.0
    cosine: bool = True

    @property
    def rows_alone(self):
        """Whether the score gradient of a pair depends on its row alone, not on columns or the
        matrix.
        """
        return self.kind != "levels" and not self.symmetric

    def state_shapes(self, rows, columns):
        """The shapes of the state's parts."""
        if self.kind == "levels":
            return [(2, self.levels.shape[0])] * 2
        return [(rows,)] * _PARTS[self.kind] + [(columns,)] * (2 * self.symmetric)

    @property
    def whole_rows(self):
        """Whether a forward reduction has to see a row at once: its terms need the sum over all of
        it.
        """
        return self.kind == "multi_positive"

    def merge(self, state):
        """The state with that of columns or levels merged over the ranks of the group."""
        if not self.group:
            return state
        rows = 0 if self.kind == "levels" else 4
        return [*state[:rows], *merge_exponentials(*state[rows:], self.scale, self.group)]

    def own_gradient(self, grad):
        """dL/dloss of this rank's loss or losses -> of what its rows are part of.

        The one value of a loss over the whole matrix is that of every rank.
        """
        return all_reduce_sum(grad, self.group) if self.group and self.kind == "levels" else grad

    def loss_shape(self, rows, columns):
        """The shape of what `finish` returns."""
        if self.kind == "levels":
            return ()
        return (rows + columns * (self.symmetric and self.pairs.untargeted),)

    def loss_dtype(self, dtype):
        """The type of what `finish` returns, for the compute type `dtype`."""
        return torch.float64 if self.kind == "softmax" and self.pairs.untargeted else dtype

    def finish(self, state):
        """The losses (N,), or () for a loss over the whole matrix.

        A softmax without targets: the log-sum-exps (N,), if symmetric of the columns too (N + M,).
        """
        return _FINISH[self.kind](self, state)

    def coefficients(self, state, grad):
        """What the score gradient of each pair needs beside its score, for dL/dloss `grad`."""
        return _COEFFICIENTS[self.kind](self, state, grad)


def _softmax_finish(tile, state):
    top, total, target_logits, target_sums = state[:4]
    lse = tile.scale * top + total.log()
    if tile.pairs.untargeted:
        of_columns = [tile.scale * state[4] + state[5].log()] if tile.symmetric else []
        return torch.cat([lse, *of_columns])
    if tile.symmetric:
        top, total = (column[tile.pairs.positives] for column in state[4:])
        lse = 0.5 * (lse + tile.scale * top + total.log())
    if tile.pairs.one_positive:
        return lse - target_logits
    if tile.normalise:
        losses = lse - target_logits / target_sums
    else:
        losses = lse * target_sums - target_logits
    # A row without a target contributes nothing, whatever its log-sum-exp.
    return torch.where((target_sums == 0) & (target_logits == 0), 0.0, losses)


def _softmax_coefficients(tile, state, grad):
    """Per row: top, weight of exp(scale (s - top)), weight of the target; per column the first two.

    Relative to the maximum rather than the log-sum-exp: a row of one candidate then has
    probability exactly 1 and score gradient exactly 0.
    """
    top, total, _, target_sums = state[:4]
    weight = grad * tile.scale
    if tile.pairs.untargeted:
        rows, columns = weight.split([top.numel(), weight.numel() - top.numel()])
        of_columns = (state[4], _over(columns, state[5])) if tile.symmetric else (None, None)
        return top, _over(rows, total), torch.zeros_like(top), *of_columns
    if not tile.symmetric:
        if tile.normalise:
            weight = torch.where(target_sums == 0, 0.0, weight / target_sums)
        return top, _over(weight * target_sums, total), weight, None, None
    column_top, column_total = state[4:]
    column_weight = _column_weight(tile, state, weight)
    return top, _over(0.5 * weight, total), weight, column_top, _over(column_weight, column_total)


def _over(weight, total):
    return torch.where(total == 0, 0.0, weight / total)


def margin_gradient(tile, state, grad):
    """What the margin adds to dL/dscale: -margin * sum_i dL/dz at the positives."""
    top, total, positive_logits, _ = state[:4]
    score_grad = grad * ((positive_logits - tile.scale * top).exp() / total - 1)
    if tile.symmetric:
        top, total = (column[tile.pairs.positives] for column in state[4:])
        weight = _column_weight(tile, state, grad)[tile.pairs.positives]
        probability = (positive_logits - tile.scale * top).exp() / total
        score_grad = 0.5 * (score_grad - grad) + weight * probability
    return -tile.margin * score_grad.sum()


def _column_weight(tile, state, grad):
    """Per column, half the weights of the rows whose positive it is."""
    # Not index_add_, which adds duplicates in any order on a GPU.
    weight = torch.zeros_like(state[4])
    weight.index_put_((tile.pairs.positives,), 0.5 * grad, accumulate=True)
    return all_reduce_sum(weight, tile.group) if tile.group else weight


def _levels_finish(tile, state):
    _, _, pairs, reach = _levels_sums(tile, state)
    return torch.logaddexp(reach + pairs, torch.zeros_like(pairs))


def _levels_coefficients(tile, state, grad):
    """Per level: high, up, low, down of csrc/epilogue.h, with dL/dloss and the scale inside."""
    (up, down), shift, pairs, reach = _levels_sums(tile, state)
    none = up.new_full((1,), -torch.inf)
    above = torch.cat([torch.logcumsumexp(down.flip(0), 0).flip(0)[1:], none])
    below = torch.cat([none, torch.logcumsumexp(up, 0)[:-1]])
    loss = torch.logaddexp(pairs, -reach)
    (high, low), total = state
    factors = (shift + torch.stack([above, below]) - loss).exp() * (grad * tile.scale)
    factors = torch.where(total == 0, 0.0, factors)
    return high, factors[0], low, factors[1]


def _levels_sums(tile, state):
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


def _multi_similarity_finish(tile, state):
    return sum(
        torch.where(total == 0, 0.0, torch.nn.functional.softplus(lse) / scale)
        for _, total, lse, scale in _multi_similarity_sums(tile, state)
    )


def _multi_similarity_coefficients(tile, state, grad):
    """Per row: top and weight of exp(scale (s - top)) of the negatives, and of the positives."""
    return tuple(
        part
        for top, total, lse, _ in _multi_similarity_sums(tile, state)
        for part in (top, _over(grad * lse.sigmoid(), total))
    )


def _multi_similarity_sums(tile, state):
    """For negatives and positives: top, sum, lse of the logits, scale; `margin` is the base."""
    sides = (tile.scale, -tile.margin, state[:2]), (tile.positive_scale, tile.margin, state[2:])
    for scale, shift, (top, sums) in sides:
        yield top, sums, scale * (top + shift) + sums.log(), scale


def _multi_positive_finish(tile, state):
    return state[2]


def _multi_positive_coefficients(tile, state, grad):
    """Per row: top and weight of the negatives, log of their sum, weight of a positive."""
    top, total, _, score_grads = state
    weight = grad * tile.scale
    return (
        top,
        _over(weight * score_grads, total),
        total.log(),
        torch.where(total == 0, 0.0, weight),
    )


def _losses_first(tile, state):
    return state[0]


def _weights_alone(tile, state, grad):
    return (grad,)


# Parts of the state of a row.
_PARTS = {
    "softmax": 4,
    "sigmoid": 2,
    "squared_error": 1,
    "multi_similarity": 4,
    "multi_positive": 4,
}
_FINISH = {
    "softmax": _softmax_finish,
    "multi_similarity": _multi_similarity_finish,
    "multi_positive": _multi_positive_finish,
    "sigmoid": _losses_first,
    "squared_error": _losses_first,
    "levels": _levels_finish,
}
_COEFFICIENTS = {
    "softmax": _softmax_coefficients,
    "multi_similarity": _multi_similarity_coefficients,
    "multi_positive": _multi_positive_coefficients,
    "sigmoid": _weights_alone,
    "squared_error": _weights_alone,
    "levels": _levels_coefficients,
}

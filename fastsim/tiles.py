"""The tile losses between the passes: from what a fold leaves to losses and slope coefficients.

State by kind, as a backend's `fold` and `visit` return it, float64, (N,) unless said otherwise:
softmax: row lse of the logits, sum_j t z, sum_j t, and if symmetric the column lse (M,).
sigmoid: sum_j loss, sum_j dloss/dz.
squared_error: sum_j loss.
levels: (2, K), per level lse z and lse -z.
Logits are z = scale * s (+ bias); a softmax takes `margin` from the positive's score first.
"""

from dataclasses import dataclass

import torch

from fastsim.targets import Pairs


@dataclass(frozen=True)
class Tile:
    """A tile loss: its kind, its pairs and its parameters.

    normalise: divide each row's targets by their sum, a row without any contributing 0 (SupCon).
    symmetric: the mean of the row softmax and the column softmax of the positives.
    levels: (K,) ascending distinct target values in the compute type.
    """

    kind: str
    pairs: Pairs
    scale: float = 1.0
    bias: float = 0.0
    margin: float = 0.0
    normalise: bool = False
    symmetric: bool = False
    levels: torch.Tensor | None = None

    @property
    def needs_one_visit(self):
        """Whether a block of whole rows gives both the losses and the slope."""
        return self.kind != "levels" and not self.symmetric

    def state_shapes(self, rows, columns):
        """The shapes of the state's parts."""
        if self.kind == "levels":
            return [(2, self.levels.shape[0])]
        parts = {"softmax": 3, "sigmoid": 2, "squared_error": 1}[self.kind]
        return [(rows,)] * parts + [(columns,)] * self.symmetric

    def finish(self, state):
        """The losses (N,), or () for a loss over the whole matrix."""
        return _FINISH[self.kind](self, state)

    def coefficients(self, state, grad):
        """What the slope of each pair needs beside its score, for dL/dloss `grad`."""
        return _COEFFICIENTS[self.kind](self, state, grad)


def _softmax_finish(tile, state):
    lse, target_logits, target_sums = state[:3]
    if tile.normalise:
        losses = lse - target_logits / target_sums
    else:
        losses = lse * target_sums - target_logits
    if tile.symmetric:
        losses = 0.5 * (losses + state[3][tile.pairs.positives] - target_logits)
    # A row without a target contributes nothing, whatever its log-sum-exp.
    return torch.where((target_sums == 0) & (target_logits == 0), 0.0, losses)


def _softmax_coefficients(tile, state, grad):
    lse, _, target_sums = state[:3]
    weight = grad * tile.scale
    if not tile.symmetric:
        unit = (
            torch.where(target_sums == 0, 0.0, weight / target_sums) if tile.normalise else weight
        )
        # An empty row has lse = -inf and weight 0; 0 keeps its slopes finite.
        lse = torch.where(lse == -torch.inf, 0.0, lse)
        return lse, unit * target_sums, unit, None, None
    column_lse = torch.where(state[3] == -torch.inf, 0.0, state[3])
    column_weight = _by_column(tile.pairs.positives, 0.5 * weight, column_lse)
    return lse, 0.5 * weight, weight, column_lse, column_weight


def _by_column(positives, values, like):
    """Sums of the values by their rows' positive column."""
    # Not index_add_, which adds duplicates in any order on a GPU.
    return torch.zeros_like(like).index_put_((positives,), values, accumulate=True)


def margin_gradient(tile, state, grad):
    """What the margin adds to dL/dscale: -margin * sum_i dL/dz at the positives."""
    lse, positive_logits = state[:2]
    slope = grad * ((positive_logits - lse).exp() - 1)
    if tile.symmetric:
        # Rows may share a positive: its column has the softmax of each of them.
        positives, half = tile.pairs.positives, 0.5 * grad
        shared = _by_column(positives, half, state[3])[positives]
        slope = 0.5 * slope - half + shared * (positive_logits - state[3][positives]).exp()
    return -tile.margin * slope.sum()


def _levels_finish(tile, state):
    (lse,) = state
    up, down = lse
    below = torch.logcumsumexp(up, 0)[:-1]
    terms = torch.cat([down[1:] + below, lse.new_zeros(1)])
    return torch.logsumexp(terms, 0)


def _levels_coefficients(tile, state, grad):
    (lse,) = state
    up, down = lse
    loss = _levels_finish(tile, state)
    none = lse.new_full((1,), -torch.inf)
    above = torch.cat([torch.logcumsumexp(down.flip(0), 0).flip(0)[1:], none]) - loss
    below = torch.cat([none, torch.logcumsumexp(up, 0)[:-1]]) - loss
    return above, below, grad * tile.scale


def _losses_first(tile, state):
    return state[0]


def _weights_alone(tile, state, grad):
    return (grad,)


_FINISH = {
    "softmax": _softmax_finish,
    "sigmoid": _losses_first,
    "squared_error": _losses_first,
    "levels": _levels_finish,
}
_COEFFICIENTS = {
    "softmax": _softmax_coefficients,
    "sigmoid": _weights_alone,
    "squared_error": _weights_alone,
    "levels": _levels_coefficients,
}

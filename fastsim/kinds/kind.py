"""What the engine, the ring and the backends know about a kind of tile loss.

A forward pass goes through the scores panel by panel and keeps a state. `finish` turns the state
into the losses; `coefficients` turns it into what the score gradient of a pair needs besides its
score. A state is a list of tensors in the type of sums (fastsim/precision.py); `Kind.parts`
describes them, in order.
"""

from dataclasses import dataclass

import torch

from fastsim.collectives import all_reduce_sum, merge_exponentials
from fastsim.precision import rounded_off

EMPTY = -1e30  # the maximum of no scores; a library whose kLeftOut differs is refused

ROWS, COLUMNS, MATRIX = "rows", "columns", "matrix"


@dataclass(frozen=True)
class StatePart:
    """A part of a state: `size` tensors, over rows, over columns or over the whole matrix.

    needs_row: whether its terms need the earlier parts over the whole row.
    """

    axis: str = ROWS
    needs_row: bool = False

    size = 1
    fills = (0.0,)  # the value of each tensor before the first score

    def merge(self, tile, one, other):
        """The tensors over the scores of both; those of `one` came first."""
        raise NotImplementedError

    def lost(self, tile, one, other, both):
        """(rounding error, factor) of each tensor of `both`, which was merged from `one` and
        `other`. factor: the number by which `one` was multiplied.
        """
        raise NotImplementedError

    def all_reduce(self, tile, mine):
        """The tensors over the scores of all ranks of `tile.group`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Total(StatePart):
    """A sum."""

    def merge(self, tile, one, other):
        return [one[0] + other[0]]

    def lost(self, tile, one, other, both):
        return [(rounded_off(one[0], other[0], both[0]), 1.0)]

    def all_reduce(self, tile, mine):
        return [all_reduce_sum(mine[0], tile.group)]


@dataclass(frozen=True)
class Exponentials(StatePart):
    """A maximum `top` and the sum of exp(scale (s - top)); EMPTY and 0 without scores.

    scale: the name of the field of `TileLoss` that holds the scale. s is the score, or a function
    of it that the kind defines.
    """

    scale: str = "scale"

    size = 2
    fills = (EMPTY, 0.0)

    def merge(self, tile, one, other):
        (top, total), (other_top, other_total) = one, other
        scale = getattr(tile, self.scale)
        both = torch.maximum(top, other_top)
        grown = other_total * (scale * (other_top - both)).exp()
        return [both, total * (scale * (top - both)).exp() + grown]

    def lost(self, tile, one, other, both):
        (top, total), (other_top, other_total), (both_top, sums) = one, other, both
        scale = getattr(tile, self.scale)
        factor = (scale * (top - both_top)).exp()
        grown = other_total * (scale * (other_top - both_top)).exp()
        return [(0.0, 0.0), (rounded_off(total * factor, grown, sums), factor)]

    def all_reduce(self, tile, mine):
        return list(merge_exponentials(*mine, getattr(tile, self.scale), tile.group))


def with_partials(top, total, tops, sums, scale):
    """A maximum and its sum of exponentials, merged with T partial ones, tops and sums (T, ...)."""
    both = torch.maximum(top, tops.amax(0))
    grown = (sums * (scale * (tops - both)).exp()).sum(0)
    return both, total * (scale * (top - both)).exp() + grown


def joined(states):
    """The states of consecutive bands of rows as one state."""
    return states[0] if len(states) == 1 else list(map(torch.cat, zip(*states, strict=True)))


@dataclass(frozen=True)
class OfPositive(StatePart):
    """A value of the row's one positive; the state with its column always comes first."""

    def merge(self, tile, one, other):
        return one

    def lost(self, tile, one, other, both):
        return [(0.0, 0.0)]


class Kind:
    """A kind of tile loss. A subclass is its record, and an instance of it stands in `KINDS`.

    name: its name in `TileLoss.kind` and in every backend's table of epilogues.
    state: the parts of the state, in order.
    parameters: the fields of `TileLoss`, all numbers, that an epilogue takes besides the pairs.
    learns: which of "scale" and "bias" may need a gradient.
    coefficient_axes: the axis of each coefficient: ROWS, COLUMNS or MATRIX.
    weights_at: the indices of the coefficients that are proportional to dL/dloss.
    elementwise: whether the score gradient of a pair needs only its score and its row's weight.
    whole_matrix: whether there is one loss over all scores instead of one for each row.
    in_panels: whether it has a state and score gradients, and so can be computed by panels.
    """

    name: str
    state: tuple[StatePart, ...] = ()
    parameters: tuple[str, ...] = ("scale",)
    learns: tuple[str, ...] = ("scale",)
    coefficient_axes: tuple[str, ...] = (ROWS,)
    weights_at: tuple[int, ...] = (0,)
    elementwise = False
    whole_matrix = False
    in_panels = True

    def parts(self, tile):
        """The parts of the state of this tile, in order."""
        return self.state

    def finish(self, tile, state):
        """The losses (N,) of the rows, or () of the whole matrix, from the state."""
        raise NotImplementedError

    def coefficients(self, tile, state, grad):
        """What the score gradient of a pair needs besides its score, for dL/dloss `grad`.

        One tensor for each of `coefficient_axes`, or None where this tile needs none.
        """
        return (grad,)

    def largest_score_grad(self, tile, weights, columns):
        """An upper bound () of |dL/ds| for the losses times `weights` >= 0, (N,) or ().

        The loss scale of 16-bit score gradients follows from it. Does not wait for the device.
        """
        raise NotImplementedError

    def largest_of(self, tile, coefficients, columns):
        """`largest_score_grad` from the coefficients.

        It is closer, as the coefficients contain the state: among many scores each has a small
        share. This version is for kinds whose coefficients weigh exponentials relative to their
        maxima.
        """
        weights = (coefficients[place] for place in self.weights_at)
        return sum(largest(weight) for weight in weights if weight is not None)

    def scaled(self, coefficients, factor):
        """The coefficients for dL/dloss times a factor ()."""
        scaled = list(coefficients)
        for place in self.weights_at:
            scaled[place] = None if scaled[place] is None else scaled[place] * factor
        return scaled

    def loss_shape(self, tile, rows, columns):
        """The shape of the result of `finish`."""
        return () if self.whole_matrix else (rows,)

    def scale_gradient(self, tile, state, grad):
        """dL/dscale (), less its part from the score gradients, sum_ij s_ij dL/ds_ij / scale.

        0.0 if there is no other part. grad: dL/dloss.
        """
        return 0.0

    def bias_gradient(self, tile, state, grad):
        """dL/dbias (), for a kind that learns it."""
        raise NotImplementedError


def largest_target(pairs):
    """An upper bound of |t| over all pairs: a number, or for dense targets their maximum ()."""
    if pairs.factors is not None and pairs.factors.cosine:
        return 1.0
    if pairs.factors is not None:
        rows, columns = (side.norm(dim=1).amax() for side in pairs.factors[:2])
        return rows * columns
    if pairs.dense is None:
        return 1.0 if pairs.row_groups is None else max(1.0, abs(pairs.negative_target))
    low, high = torch.aminmax(pairs.dense)
    return torch.maximum(-low.float(), high.float())


def largest(values):
    """max |v| (), 0 if there are no values."""
    if not values.numel():  # a rank of a group may have no rows
        return values.new_zeros(())
    return torch.linalg.vector_norm(values, ord=torch.inf)


def over(weight, total):
    """weight / total, 0 where the total is 0."""
    return (weight / total).masked_fill_(total == 0, 0.0)

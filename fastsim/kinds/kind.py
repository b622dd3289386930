"""What the engine, the ring and the backends know of a kind of tile loss.

A forward pass looks at panel after panel of scores and keeps a state; `finish` makes the
losses of it, and `coefficients` what the score gradient of a pair needs beside its score. A state
is a list of tensors in the type of sums (fastsim/precision.py), described by the parts that
`Kind.parts` names, in their order.
"""

from dataclasses import dataclass

import torch

from fastsim.collectives import all_reduce_sum, merge_exponentials
from fastsim.precision import rounded_off

EMPTY = -1e30  # the maximum of no scores: kLeftOut of csrc/epilogue.h, or the library is refused

ROWS, COLUMNS, MATRIX = "rows", "columns", "matrix"


@dataclass(frozen=True)
class StatePart:
    """A part of a state: `size` tensors for each row, each column, or the whole matrix.

    needs_row: whether its terms need the parts before it over the whole row.
    """

    axis: str = ROWS
    needs_row: bool = False

    size = 1
    fills = (0.0,)  # of each tensor, before any score has been looked at

    def merge(self, tile, one, other):
        """The tensors over the scores of both; `one` of those that were looked at first."""
        raise NotImplementedError

    def lost(self, tile, one, other, both):
        """What rounding has taken from `both`, merged of `one` and `other`, and the factor by which
        `one` went in: a pair for each tensor.
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
    """A maximum `top`, EMPTY of no scores, and the sum of exp(scale (s - top)), then 0.

    scale: the name of the field of `Tile` with the scale. s is the score, or what the kind makes
    of it.
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
    """Maxima and sums of exponentials relative to them, with partial ones (T, ...) added."""
    both = torch.maximum(top, tops.amax(0))
    grown = (sums * (scale * (tops - both)).exp()).sum(0)
    return both, total * (scale * (top - both)).exp() + grown


def joined(states):
    """The states of bands of rows as one state, of all of them."""
    return states[0] if len(states) == 1 else list(map(torch.cat, zip(*states, strict=True)))


@dataclass(frozen=True)
class OfPositive(StatePart):
    """What the score of the row's one positive gives; the columns with it are looked at first."""

    def merge(self, tile, one, other):
        return one

    def lost(self, tile, one, other, both):
        return [(0.0, 0.0)]


class Kind:
    """A kind of tile loss. A subclass is its record, and an instance of it stands in `KINDS`.

    name: by which `Tile.kind` and every backend's table of epilogues call it.
    state: the parts of the state, in their order.
    parameters: the fields of `Tile` that an epilogue takes beside the pairs, all of them numbers.
    learns: those that may want a gradient, of "scale" and "bias".
    coefficient_axes: of what each of the coefficients is: ROWS, COLUMNS or MATRIX.
    weights_at: the places of those that are proportional to dL/dloss.
    elementwise: whether the score gradient of a pair needs its score and its row's weight alone.
    whole_matrix: whether there is one loss of all scores rather than one of each row.
    in_panels: whether it has a state and score gradients, so that panel after panel will do.
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
        """The parts of the state of this tile, in their order."""
        return self.state

    def finish(self, tile, state):
        """The losses (N,) of the rows, or () of the whole matrix, from the state."""
        raise NotImplementedError

    def coefficients(self, tile, state, grad):
        """What the score gradient of a pair needs beside its score, for dL/dloss `grad`.

        As many tensors as `coefficient_axes`, None where this tile needs none.
        """
        return (grad,)

    def largest_score_grad(self, tile, weights, columns):
        """A bound () on |dL/dS| of the losses weighted by `weights` >= 0, (N,) or ().

        From it follows the loss scale of 16-bit score gradients; nothing waits for the device.
        """
        raise NotImplementedError

    def largest_of(self, tile, coefficients, columns):
        """As `largest_score_grad`, of the losses that the coefficients are for.

        Closer, since the state is in them: of many scores each has a small share. Here of kinds
        whose exponentials, relative to their tops, have these weights.
        """
        weights = (coefficients[place] for place in self.weights_at)
        return sum(largest(weight) for weight in weights if weight is not None)

    def scaled(self, coefficients, factor):
        """The coefficients for dL/dloss times a factor ()."""
        found = list(coefficients)
        for place in self.weights_at:
            found[place] = None if found[place] is None else found[place] * factor
        return found

    def loss_shape(self, tile, rows, columns):
        """The shape of what `finish` returns."""
        return () if self.whole_matrix else (rows,)

    def scale_gradient(self, tile, state, grad):
        """What of dL/dscale the score gradients do not show: all but sum_ij S_ij dL/dS_ij / scale.

        (), or 0.0 where that is all. grad: dL/dloss.
        """
        return 0.0

    def bias_gradient(self, tile, state, grad):
        """dL/dbias () of a kind that learns it."""
        raise NotImplementedError


def largest_target(pairs):
    """A bound on |t| over all pairs: a number, or of a dense target () float32, measured."""
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
    """max |v| (), 0 of none."""
    if not values.numel():  # one rank of a group may have no rows
        return values.new_zeros(())
    return torch.linalg.vector_norm(values, ord=torch.inf)


def over(weight, total):
    """weight / total, 0 where the total is."""
    return (weight / total).masked_fill_(total == 0, 0.0)

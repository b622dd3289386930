"""Batch-hard triplet loss: the farthest of the own group against the nearest of any other.

    p_i = max_{j != i, group(j) = group(i)} d(i, j),   n_i = min_{group(j) != group(i)} d(i, j)
    L_i = relu(p_i - n_i + margin);   soft: softplus(p_i - n_i + margin)

Source: Hermans, Beyer and Leibe 2017, "In Defense of the Triplet Loss for Person
Re-Identification", equation 5, there with Euclidean d; the soft margin (of margin 0) in section 2.
One pass over the scores, forward only, finds both columns; the distances are then taken of the
pairs themselves, so that they are as exact as the inputs, and the gradient touches two rows a row.
For Euclidean d the order of the distances to x_i is that of x_i . x_j - |x_j|^2 / 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.backends import pick
from fastsim.checks import check_choice, check_number, check_reduction
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float
from fastsim.scores import paired, unit_rows, without_autocast
from fastsim.selection import hardest_columns
from fastsim.targets import dense_targets, groups_of_scores, parse_groups, taking_part

DISTANCES = ("euclidean", "cosine")


class HardestPairs(NamedTuple):
    """The hardest positive and negative of each row, all (N,).

    A row without a positive has distance -inf and index -1, one without a negative +inf and -1.
    """

    positive: Tensor
    negative: Tensor
    positive_index: Tensor
    negative_index: Tensor


def batch_hard_triplet(
    embeddings,
    groups,
    *,
    margin=1.0,
    distance="euclidean",
    soft=False,
    reduction="mean",
    backend=None,
):
    """Batch-hard triplet loss of embeddings (N, D) with integer groups (N,).

    distance: "euclidean", or "cosine", which is 1 - cosine. soft: softplus in place of the hinge.
    A row without a positive or without a negative has loss 0 and does not count in the mean, so a
    batch of one group gives 0 with zero gradient. At distance 0 the gradient of the distance is 0.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit, RuntimeError for a backend that cannot serve them. Source: see the module.
    """
    _check_options(margin, soft, reduction)
    hardest = hardest_pairs(embeddings, groups, distance=distance, backend=backend)
    return _loss(hardest, margin, soft, reduction)


def hardest_pairs(
    embeddings,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    distance="euclidean",
    backend=None,
):
    """Each row's farthest reference of its own group and nearest of any other.

    embeddings (N, D) and groups (N,) integers; references (M, D) and reference_groups (M,), by
    default the embeddings themselves, a row not being its own positive. own_first: the first N
    references are the embeddings' own, so that row i leaves out reference i. distance: as for
    `batch_hard_triplet`, and differentiable.

    Returns `HardestPairs`. ValueError or TypeError for arguments that do not fit, RuntimeError
    for a backend that cannot serve them.
    """
    check_choice("distance", distance, DISTANCES)
    pairs = parse_groups(embeddings, groups, references, reference_groups, own_first)
    chosen = pick(backend, embeddings)
    measure = _MEASURES[distance]
    x = measure.points(embeddings, chosen)
    y = None if references is None else measure.points(references, chosen)
    if chosen.name == "eager":
        return _hardest_of(measure.all_distances(x, x if y is None else y), pairs)
    rows, columns, offsets, dtype = measure.operands(x, y, embeddings.dtype)
    indices = hardest_columns(rows, columns, offsets, dtype, pairs, chosen)
    y = x if y is None else y
    positive, negative = (measure.distances(x, y[j.clamp(min=0)]) for j in indices)
    # What is not finite is never the hardest, but has to reach the loss.
    none = 0 * rows.sum() if columns is None else 0 * (rows.sum() + columns.sum())
    return HardestPairs(
        torch.where(indices[0] >= 0, positive, -torch.inf) + none,
        torch.where(indices[1] >= 0, negative, torch.inf) + none,
        *indices,
    )


class BatchHardTriplet(LossModule):
    """The module of `batch_hard_triplet`."""

    function = staticmethod(batch_hard_triplet)


def batch_hard_triplet_from_scores(
    scores, groups, *, margin=1.0, distance="euclidean", soft=False, reduction="mean"
):
    """The specification of `batch_hard_triplet`, the other parameters as there.

    scores (N, N): the cosines for distance "cosine", else the distances themselves.
    """
    pairs = groups_of_scores(scores, groups, None, False)
    check_choice("distance", distance, DISTANCES)
    _check_options(margin, soft, reduction)
    distances = as_float(scores) if distance == "euclidean" else 1 - as_float(scores)
    return _loss(_hardest_of(distances, pairs), margin, soft, reduction)


def _hardest_of(distances, pairs):
    part = taking_part(pairs, *distances.shape, distances.device)
    own = dense_targets(pairs, *distances.shape, torch.bool, distances.device)
    none = 0 * distances.sum(1)  # a NaN or Inf reaches its row
    positive, positive_index = distances.masked_fill(~(part & own), -torch.inf).max(1)
    negative, negative_index = distances.masked_fill(~part | own, torch.inf).min(1)
    return HardestPairs(
        positive + none,
        negative + none,
        torch.where((part & own).any(1), positive_index, -1),
        torch.where((part & ~own).any(1), negative_index, -1),
    )


def _loss(hardest, margin, soft, reduction):
    gap = hardest.positive - hardest.negative + margin
    losses = torch.nn.functional.softplus(gap) if soft else torch.relu(gap)
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    counted = (hardest.positive_index >= 0) & (hardest.negative_index >= 0)
    return losses.sum() / counted.sum().clamp(min=1)


def _check_options(margin, soft, reduction):
    check_number("margin", margin)
    check_choice("soft", soft, (False, True))
    check_reduction(reduction)


# ---- the two distances ----


class _Euclidean:
    @staticmethod
    def points(x, backend):
        return as_float(x)

    @staticmethod
    def distances(x, y):
        # The norm of torch has gradient 0 at 0, where a square root has infinity.
        return torch.linalg.vector_norm(x - y, dim=-1)

    @staticmethod
    def all_distances(x, y):
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    @torch.no_grad()
    def operands(x, y, dtype):
        """(rows, columns or None, offsets, dtype of the operands) for `hardest_columns`.

        Relative to the centre, which changes no distance and makes the scores small, and in units
        of the largest norm, which keeps them away from the ends of the range.
        """
        centre = (x if y is None else y).mean(0, dtype=torch.float64).to(x.dtype)
        sides = [(side - centre).contiguous() for side in (x, y) if side is not None]
        norms = [torch.linalg.vector_norm(side, dim=1, dtype=torch.float64) for side in sides]
        largest = torch.cat(norms).amax()
        largest = torch.where(largest == 0, 1.0, largest)
        for side in sides:
            side.mul_((1 / largest).to(x.dtype))
        offsets = (0.5 * (norms[-1] / largest).square()).to(x.dtype)
        return sides[0], None if y is None else sides[1], offsets, torch.float32


class _Cosine:
    points = staticmethod(unit_rows)

    @staticmethod
    def distances(x, y):
        return 1 - paired(x, y)

    @staticmethod
    def all_distances(x, y):
        with without_autocast(x.device.type):
            return 1 - x @ y.T

    @staticmethod
    def operands(x, y, dtype):
        """As for Euclidean, nothing to be taken from the scores."""
        return x.detach(), None if y is None else y.detach(), None, dtype


_MEASURES = {"euclidean": _Euclidean, "cosine": _Cosine}

"""Batch-hard triplet loss: the farthest of the own group against the nearest of any other.

    p_i = max_{j != i, group(j) = group(i)} d(i, j),   n_i = min_{group(j) != group(i)} d(i, j)
    L_i = relu(p_i - n_i + margin);   soft: softplus(p_i - n_i + margin)

Source: Hermans, Beyer and Leibe 2017, "In Defense of the Triplet Loss for Person
Re-Identification", equation 5, there with Euclidean d; the soft margin (of margin 0) in section 2.
One pass over the scores, forward only, finds both columns; the distances are then taken of the
pairs themselves, so that they are as exact as the inputs, and the gradient touches two rows a row.
For Euclidean d the order of the distances to x_i is that of x_i . x_j - |x_j|^2 / 2.
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction
from fastsim.backends import pick
from fastsim.checks import check_choice, check_number, check_reduction
from fastsim.distributed import batchwise, join
from fastsim.engine.chosen_rows import partner_distances, partner_products
from fastsim.engine.distances import all_distances
from fastsim.engine.prepared import Prepared, note, once_per_signature
from fastsim.engine.ring import ring_hardest, ring_sum
from fastsim.engine.selection import (
    centred_rows,
    finds_hardest_pairs,
    hardest_columns,
)
from fastsim.engine.selection import hardest_pairs as found_pairs
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    as_ids,
    dense_targets,
    global_groups,
    groups_of_scores,
    pair_mask,
    parse_groups,
)
from fastsim.reduce import as_float, reduce, softplus
from fastsim.scores import paired, unit_rows, without_autocast

DISTANCES = ("euclidean", "cosine")


class HardestPairs(NamedTuple):
    """The hardest positive and negative of each row, all (N,).

    A row without a positive has distance -inf and index -1, one without a negative +inf and -1.
    """

    positive: Tensor
    negative: Tensor
    positive_index: Tensor
    negative_index: Tensor


@once_per_signature
@batchwise
def batch_hard_triplet(
    embeddings: Tensor,
    groups: Tensor,
    *,
    margin: float = 1.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    soft: bool = False,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Batch-hard triplet loss: the farthest of the group against the nearest outside.

    For rows with a class or group id, as in re-identification. `batch_semi_hard_triplet` and
    `batch_all_triplet` look at more triplets; pairs without labels have `full_triplet`.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; equal ones are positives of each other.
        margin: a number, by how much the positive is to be closer than the negative.
        distance: "euclidean", or "cosine", which is 1 - cosine. At distance 0 its gradient is 0.
        soft: softplus in place of the hinge.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: its name; None chooses.

    Returns:
        A scalar, or (N,) for reduction "none". A row without a positive or without a negative has
        loss 0 and does not count in the mean, so a batch of one group gives 0 with zero gradient.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> groups = torch.tensor([0, 0, 1, 1])
        >>> fastsim.batch_hard_triplet(embeddings, groups, reduction="none")
        tensor([0., 0., 1., 0.])
    """
    _check_options(margin, soft, reduction)
    check_choice("distance", distance, DISTANCES)
    pairs = parse_groups(embeddings, groups, None, None, False, empty=group is not None)
    chosen = pick(backend, embeddings, margin, kind="hardest", group=group)
    if group is None and _serves_at_once(embeddings, distance, chosen):
        options = {"margin": margin, "soft": soft, "reduction": reduction, "backend": chosen}
        small = Prepared(
            partial(_loss_at_once, **options), lambda x, _: finds_hardest_pairs(x, chosen)
        )
        loss = small(embeddings, groups)
        note((embeddings, groups), small, loss)
        return loss
    batch = join(
        group,
        "batch_hard_triplet",
        embeddings,
        embeddings,
        margin=margin,
        distance=distance,
        soft=soft,
        reduction=reduction,
        backend=chosen.name,
    )
    hardest = _hardest(embeddings, embeddings, pairs, distance, batch, chosen)
    return batch.reduce(_losses(hardest, margin, soft), reduction, _count(hardest, reduction))


@batchwise
def hardest_pairs(
    embeddings: Tensor,
    groups: Tensor,
    references: Tensor | None = None,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    group: Group = None,
    backend: str | None = None,
) -> HardestPairs:
    """Each row's farthest reference of its own group and nearest of any other.

    The pairs of `batch_hard_triplet`, for a loss of your own.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; equal ones are positives of each other.
        references: (M, D), what the embeddings are held against; by default themselves, each row
            left out of its own.
        reference_groups: (M,) integers, together with references.
        own_first: the first N references are the embeddings' own, so row i leaves out reference i.
        distance: "euclidean", or "cosine", which is 1 - cosine.
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`. The rows are then the rank's own, the indices those of the
            references of all ranks, rank after rank.
        backend: its name; None chooses.

    Returns:
        `HardestPairs`, its distances differentiable.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> fastsim.hardest_pairs(embeddings, torch.tensor([0, 0, 1, 1])).negative_index
        tensor([2, 2, 1, 1])
    """
    check_choice("distance", distance, DISTANCES)
    pairs = parse_groups(
        embeddings, groups, references, reference_groups, own_first, empty=group is not None
    )
    chosen = pick(backend, embeddings, references, kind="hardest", group=group)
    columns = embeddings if references is None else references
    batch = join(
        group,
        "hardest_pairs",
        embeddings,
        columns,
        references=references,
        own_first=own_first,
        distance=distance,
        backend=chosen.name,
    )
    return _hardest(embeddings, columns, pairs, distance, batch, chosen)


class BatchHardTriplet(LossModule):
    """The module of `batch_hard_triplet`."""

    function = staticmethod(batch_hard_triplet)

    def __init__(
        self,
        *,
        margin: float = 1.0,
        distance: Literal["euclidean", "cosine"] = "euclidean",
        soft: bool = False,
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def batch_hard_triplet_from_scores(
    scores: Tensor,
    groups: Tensor,
    *,
    margin: float = 1.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    soft: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `batch_hard_triplet`, the other parameters as there.

    scores (N, N): the cosines for distance "cosine", else the distances themselves.
    """
    pairs = groups_of_scores(scores, groups, None, False)
    check_choice("distance", distance, DISTANCES)
    _check_options(margin, soft, reduction)
    distances = as_float(scores) if distance == "euclidean" else 1 - as_float(scores)
    hardest = _hardest_of(distances, pairs)
    return reduce(_losses(hardest, margin, soft), reduction, _count(hardest, reduction))


def _hardest(embeddings, columns, pairs, distance, batch, backend):
    """`HardestPairs` of the rank's embeddings among the columns of all ranks."""
    measure, pairs = _MEASURES[distance], global_groups(pairs, batch)
    if not batch.ring:
        columns = batch.gather_columns(columns)
    x = measure.points(embeddings, backend)
    y = x if columns is embeddings else measure.points(columns, backend)
    if backend.name == "eager":
        return _hardest_of(measure.all_distances(x, y), pairs)
    if batch.ring:
        return _ring_hardest(x, y, embeddings.dtype, measure, pairs, batch, backend)
    y = None if y is x else y
    *operands, everything = measure.operands(x, y, embeddings.dtype, backend)
    indices = hardest_columns(*operands, pairs, backend)
    distances = measure.chosen_rows(x, y, torch.stack(indices), (-torch.inf, torch.inf), backend)
    return _found(distances, indices, everything)


def _serves_at_once(x, distance, backend):
    """Whether one call of the backend finds the pairs of rows that are held against themselves."""
    return distance == "euclidean" and finds_hardest_pairs(x, backend)


def _loss_at_once(embeddings, groups, *, margin, soft, reduction, backend):
    hardest = _hardest_at_once(as_float(embeddings), as_ids(groups), backend)
    return reduce(_losses(hardest, margin, soft), reduction, _count(hardest, reduction))


def _hardest_at_once(x, groups, backend):
    """`HardestPairs` of rows against themselves, in one call of the backend."""
    indices, distances, everything = found_pairs(x, groups, backend)
    nothing = -torch.inf, torch.inf
    distances = partner_distances(x, None, indices, nothing, backend, known=distances)
    return _found(distances, indices.unbind(0), everything)


def _ring_hardest(x, y, dtype, measure, pairs, batch, backend):
    """The same where the rank's own columns travel."""
    indices = ring_hardest(x, y, dtype, measure, pairs, batch, backend)

    def of_block(x, y, columns):
        parts = []
        for index in indices:
            within = index - columns.start
            here = (within >= 0) & (within < len(y))
            distances = measure.distances(x, y[within.clamp(0, len(y) - 1)])
            parts.append(torch.where(here, distances, 0.0))
        return parts

    everything = sum((0 * side.detach()).sum() for side in (x, y))
    positive, negative = ring_sum(of_block, x, y, batch)
    positive = torch.where(indices[0] >= 0, positive, -torch.inf)
    negative = torch.where(indices[1] >= 0, negative, torch.inf)
    return _found(torch.stack([positive, negative]), indices, batch.total(everything))


def _found(distances, indices, everything):
    """`HardestPairs` of distances (2, N), with ±inf where there is none, and their indices.

    everything: a number () that is finite where all are: no other is ever the hardest, but it has
    to show.
    """
    return HardestPairs(*(distances + 0 * everything).unbind(0), *indices)


def _hardest_of(distances, pairs):
    part = pair_mask(pairs, *distances.shape, distances.device)
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


def _losses(hardest, margin, soft):
    gap = hardest.positive - hardest.negative + margin
    return softplus(gap) if soft else torch.relu(gap)


def _count(hardest, reduction):
    """Rows with a positive and a negative: the others' losses are 0."""
    if reduction != "mean":
        return None
    return (torch.minimum(hardest.positive_index, hardest.negative_index) >= 0).sum()


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
        return all_distances(x, y)

    chosen_rows = staticmethod(partner_distances)

    @staticmethod
    def operands(x, y, dtype, backend):
        """What `hardest_columns` takes, (rows, columns or None, offsets, dtype of the operands),
        and a number () that is finite where all are.
        """
        rows, columns, offsets, largest = centred_rows(x, y, backend)
        return rows, columns, offsets, torch.float32, largest


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
    def chosen_rows(x, y, columns, missing, backend):
        return 1 - partner_products(x, y, columns, [1 - value for value in missing], backend)

    @staticmethod
    def operands(x, y, dtype, backend):
        """As for Euclidean, nothing to be taken from the scores."""
        x, y = x.detach(), None if y is None else y.detach()
        return x, y, None, dtype, x.sum() if y is None else x.sum() + y.sum()


_MEASURES = {"euclidean": _Euclidean, "cosine": _Cosine}

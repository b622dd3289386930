"""Batch-hard triplet loss: a row's farthest positive against its nearest negative.

    p_i = max_{j != i, group(j) = group(i)} d(i, j),   n_i = min_{group(j) != group(i)} d(i, j)
    L_i = relu(p_i - n_i + margin);   soft: softplus(p_i - n_i + margin)

Source: Hermans, Beyer and Leibe 2017, "In Defense of the Triplet Loss for Person
Re-Identification", equation 5, with Euclidean d; the soft margin, with margin 0, is in section 2.
fastsim/losses/hardest.py finds the pairs without the matrix of distances.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction
from fastsim.backends import pick
from fastsim.checks import check_choice, check_flags, check_number, check_reduction
from fastsim.distributed import batchwise, join
from fastsim.engine.prepared import note, once_per_signature
from fastsim.losses.hardest import (
    DISTANCES,
    hardest_at_once,
    hardest_in_batch,
    hardest_of_distances,
    serves_at_once,
)
from fastsim.losses.module import LossModule
from fastsim.pairs import as_ids, groups_of_scores, parse_groups
from fastsim.reduce import as_float, reduce, softplus


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
    """Batch-hard triplet loss: the farthest row of the group against the nearest row outside.

    For rows with a class or group id, as in re-identification. `batch_semi_hard_triplet` and
    `batch_all_triplet` use more triplets; `full_triplet` is for pairs without groups.

    Formula and source: fastsim/losses/batch_hard_triplet.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        margin: a number, by how much the positive should be closer than the negative.
        distance: "euclidean", or "cosine" for 1 - cosine. The gradient at distance 0 is 0.
        soft: whether to use softplus instead of the hinge.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". A row without a positive or without a negative has
        loss 0 and does not count in the mean. A batch of a single group gives 0 with gradient 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> groups = torch.tensor([0, 0, 1, 1])
        >>> fastsim.batch_hard_triplet(embeddings, groups, reduction="none")
        tensor([0., 0., 1., 0.])
    """
    _check_options(margin, soft, reduction)
    check_choice("distance", distance, DISTANCES)
    pairs = parse_groups(embeddings, groups, None, None, False, empty=group is not None)
    chosen = pick(backend, embeddings, groups, margin, kind="hardest", group=group)
    if group is None and serves_at_once(embeddings, distance, chosen):
        options = {"margin": margin, "soft": soft, "reduction": reduction, "backend": chosen}
        loss_of = partial(_loss_at_once, **options)
        loss = loss_of(embeddings, groups)
        note((embeddings, groups), loss_of, loss)
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
    hardest = hardest_in_batch(embeddings, embeddings, pairs, distance, batch, chosen)
    return batch.reduce(_losses(hardest, margin, soft), reduction, _count(hardest, reduction))


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
    """The specification of `batch_hard_triplet`, with the same other parameters.

    scores: (N, N) cosines for distance "cosine", otherwise distances.
    """
    pairs = groups_of_scores(scores, groups, None, False)
    check_choice("distance", distance, DISTANCES)
    _check_options(margin, soft, reduction)
    distances = as_float(scores) if distance == "euclidean" else 1 - as_float(scores)
    hardest = hardest_of_distances(distances, pairs)
    return reduce(_losses(hardest, margin, soft), reduction, _count(hardest, reduction))


def _loss_at_once(embeddings, groups, *, margin, soft, reduction, backend):
    hardest = hardest_at_once(as_float(embeddings), as_ids(groups), backend)
    return reduce(_losses(hardest, margin, soft), reduction, _count(hardest, reduction))


def _losses(hardest, margin, soft):
    gap = hardest.positive - hardest.negative + margin
    return softplus(gap) if soft else torch.relu(gap)


def _count(hardest, reduction):
    """The number of rows with a positive and a negative, for the mean; None otherwise."""
    if reduction != "mean":
        return None
    return (torch.minimum(hardest.positive_index, hardest.negative_index) >= 0).sum()


def _check_options(margin, soft, reduction):
    check_number("margin", margin)
    check_flags(soft=soft)
    check_reduction(reduction)

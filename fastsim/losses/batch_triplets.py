"""Triplet losses of a batch in groups: with semi-hard negatives, and over all triplets.

    semi-hard: mean over positive pairs (i, p) of relu(d_ip - d_in + margin); n is the nearest
        negative of i that is farther away than p, or the farthest negative if none is
    all: mean of d_ip - d_in + margin over the triplets in which it is positive

d is the Euclidean distance or 1 - cosine. A row without a negative has no triplet and adds nothing.

Source: Schroff et al. 2015, "FaceNet", section 3.2 (semi-hard); Hermans et al. 2017, "In Defense
of the Triplet Loss", section 2 (batch all). The eager backend holds every triplet in memory.
"""

from typing import Literal

import torch
from torch import Tensor

from fastsim.annotations import Group
from fastsim.backends import pick
from fastsim.checks import check_choice, check_count, check_embeddings, check_integers, check_number
from fastsim.distributed import batchwise, join
from fastsim.engine.triplets import as_far, distances_of, triplet_sum
from fastsim.losses.hardest import DISTANCES
from fastsim.losses.module import LossModule
from fastsim.pairs import as_ids
from fastsim.reduce import as_float
from fastsim.scores import unit_rows


@batchwise
def batch_semi_hard_triplet(
    embeddings: Tensor,
    groups: Tensor,
    *,
    margin: float = 5.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    largest_group: int | None = None,
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Semi-hard triplet loss: each positive pair against the nearest negative beyond the positive.

    For rows with a class or group id, if training collapses with the hardest negatives
    (`batch_hard_triplet`).

    Formula and source: fastsim/losses/batch_triplets.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        margin: a number, by how much the positive should be closer than the negative.
        distance: "euclidean", or "cosine" for 1 - cosine.
        largest_group: an int, an upper bound of the number of rows of any group; if a group has
            more, the loss is NaN (the eager backend needs no bound). None: computed from the
            groups, which waits for a GPU once.
        group: a process group whose ranks each give their part of the batch; see
            `fastsim.distributed`. Embeddings are gathered, so a `Ring` is refused.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar. A batch without a positive pair, or of a single group, gives 0 with gradient 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> groups = torch.tensor([0, 0, 1, 1])
        >>> fastsim.losses.batch_semi_hard_triplet(embeddings, groups, margin=2.5)
        tensor(1.)
    """
    options = margin, distance, largest_group, group, backend
    return _mean("semi_hard", _semi_hard, embeddings, groups, *options)


@batchwise
def batch_all_triplet(
    embeddings: Tensor,
    groups: Tensor,
    *,
    margin: float = 5.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    largest_group: int | None = None,
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Batch-all triplet loss: the mean over all triplets with a positive loss.

    For rows with a class or group id, if every triplet should count; `batch_hard_triplet` uses only
    the hardest triplet of each row.

    Formula and source: fastsim/losses/batch_triplets.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        margin: a number, by how much the positive should be closer than the negative.
        distance: "euclidean", or "cosine" for 1 - cosine.
        largest_group: an int, an upper bound of the number of rows of any group; if a group has
            more, the loss is NaN (the eager backend needs no bound). None: computed from the
            groups, which waits for a GPU once.
        group: a process group whose ranks each give their part of the batch; see
            `fastsim.distributed`. Embeddings are gathered, so a `Ring` is refused.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar. A batch without a positive pair, or of a single group, gives 0 with gradient 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> groups = torch.tensor([0, 0, 1, 1])
        >>> fastsim.losses.batch_all_triplet(embeddings, groups, margin=1.0)
        tensor(1.)
    """
    options = margin, distance, largest_group, group, backend
    return _mean("all", _all, embeddings, groups, *options)


class BatchSemiHardTriplet(LossModule):
    """The module of `batch_semi_hard_triplet`."""

    function = staticmethod(batch_semi_hard_triplet)

    def __init__(
        self,
        *,
        margin: float = 5.0,
        distance: Literal["euclidean", "cosine"] = "euclidean",
        largest_group: int | None = None,
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


class BatchAllTriplet(LossModule):
    """The module of `batch_all_triplet`."""

    function = staticmethod(batch_all_triplet)

    def __init__(
        self,
        *,
        margin: float = 5.0,
        distance: Literal["euclidean", "cosine"] = "euclidean",
        largest_group: int | None = None,
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def _mean(triplets, formula, embeddings, groups, margin, distance, largest_group, group, backend):
    check_embeddings("embeddings", embeddings, empty=group is not None)
    check_integers("groups", groups, embeddings.shape[0], embeddings.device)
    check_choice("distance", distance, DISTANCES)
    check_number("margin", margin, tensor=False)
    if largest_group is not None:
        check_count("largest_group", largest_group)
    chosen = pick(backend, embeddings, groups, group=group)
    batch = join(
        group,
        f"batch_{triplets}_triplet",
        embeddings,
        embeddings,
        margin=margin,
        distance=distance,
        largest_group=largest_group,
        backend=chosen.name,
    )
    batch.refuse_ring("triplets are of gathered embeddings")
    x, groups = batch.gather_rows(embeddings), batch.gather_rows(as_ids(groups))
    x = unit_rows(x, chosen) if distance == "cosine" else as_float(x)
    anchors = batch.own_rows
    if chosen.name == "eager":
        distances = distances_of(x, anchors, distance)
        total, number = formula(distances, groups, anchors, margin, distance)
    else:
        options = float(margin), distance, triplets, largest_group, formula
        total, number = triplet_sum(x, groups, anchors, *options, chosen.name)
    mean = batch.ranks * total / batch.total(number).clamp(min=1)
    # A NaN or Inf in a row without triplets has to reach the loss too.
    return mean + 0 * x.detach().abs().amax()


# ---- the specifications: every triplet at once, from distances (A, N) of the anchors ----


def _semi_hard(distances, groups, anchors, margin, distance):
    """(sum of the terms, number of positive pairs)."""
    positive, negative = _pairs(groups, anchors)
    far, near = distances[:, :, None], distances[:, None, :]
    farther = negative[:, None, :] & (near > as_far(far, distance))
    nearest = near.masked_fill(~farther, torch.inf).amin(2)
    farthest = distances.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    chosen = torch.where(farther.any(2), nearest, farthest)
    counted = positive & negative.any(1, keepdim=True)
    gaps = torch.where(counted, distances - chosen + margin, 0.0)
    return torch.relu(gaps).sum(), positive.sum()


def _all(distances, groups, anchors, margin, _):
    """(sum of the terms, number of triplets with a term)."""
    positive, negative = _pairs(groups, anchors)
    gaps = distances[:, :, None] - distances[:, None, :] + margin
    # Not gaps > 0: a NaN has to reach the loss.
    active = positive[:, :, None] & negative[:, None, :] & ~(gaps <= 0)
    return torch.where(active, gaps, 0.0).sum(), active.sum()


def _pairs(groups, anchors):
    """Two masks (A, N): of the positive pairs and of the negative pairs."""
    same = groups[anchors, None] == groups
    diagonal = torch.eye(groups.shape[0], dtype=torch.bool, device=groups.device)[anchors]
    return same & ~diagonal, ~same

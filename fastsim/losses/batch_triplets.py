"""Triplets of one labelled batch: semi-hard negatives, and all triplets.

    semi-hard: mean over positive pairs (i, p) of relu(d_ip - d_in + margin), with n the nearest
        negative of i farther than p, or its farthest where there is none
    all: mean over the triplets with d_ip - d_in + margin > 0 of that value

d is the Euclidean distance or 1 - cosine. A row without a negative has no triplet: it adds nothing.

Source: Schroff et al. 2015, "FaceNet", section 3.2 (semi-hard); Hermans et al. 2017, "In Defense
of the Triplet Loss", section 2 (batch all). Each has a sum over as many triplets as there are
positive pairs, and more; the eager backend holds every triple.
"""

from typing import Literal

import torch
from torch import Tensor

from fastsim.backends import pick
from fastsim.checks import check_choice, check_count, check_embeddings, check_integers, check_number
from fastsim.engine.triplets import distances_of, triplet_sum
from fastsim.losses.hardest import DISTANCES
from fastsim.losses.module import LossModule
from fastsim.pairs import as_ids
from fastsim.reduce import as_float
from fastsim.scores import unit_rows


def batch_semi_hard_triplet(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 5.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    largest_class: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Semi-hard triplet loss: each positive pair against the nearest negative beyond it.

    For rows with a class label, where the hardest negatives (`batch_hard_triplet`) make training
    collapse.

    Args:
        embeddings: (N, D).
        labels: (N,) integers.
        margin: a number, by how much the positive is to be closer than the negative.
        distance: "euclidean", or "cosine", which is 1 - cosine.
        largest_class: an int, rows that no class has more of. Without it a GPU is waited for once,
            to say how many its largest class has; if a class has more, the loss is NaN.
        backend: its name; None chooses.

    Returns:
        A scalar. A batch without a positive pair or of one class gives 0 with zero gradient.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> fastsim.losses.batch_semi_hard_triplet(embeddings, labels, margin=2.5)
        tensor(1.)
    """
    options = margin, distance, largest_class, backend
    return _mean("semi-hard", _semi_hard, embeddings, labels, *options)


def batch_all_triplet(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 5.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    largest_class: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The mean over all triplets with a positive loss.

    For rows with a class label, where every triplet should count; `batch_hard_triplet` takes the
    hardest of each row alone.

    Args:
        embeddings: (N, D).
        labels: (N,) integers.
        margin: a number, by how much the positive is to be closer than the negative.
        distance: "euclidean", or "cosine", which is 1 - cosine.
        largest_class: an int, rows that no class has more of. Without it a GPU is waited for once,
            to say how many its largest class has; if a class has more, the loss is NaN.
        backend: its name; None chooses.

    Returns:
        A scalar. A batch without a positive pair or of one class gives 0 with zero gradient.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> fastsim.losses.batch_all_triplet(embeddings, labels, margin=1.0)
        tensor(1.)
    """
    options = margin, distance, largest_class, backend
    return _mean("all", _all, embeddings, labels, *options)


class BatchSemiHardTriplet(LossModule):
    """The module of `batch_semi_hard_triplet`."""

    function = staticmethod(batch_semi_hard_triplet)

    def __init__(
        self,
        *,
        margin: float = 5.0,
        distance: Literal["euclidean", "cosine"] = "euclidean",
        largest_class: int | None = None,
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
        largest_class: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def _mean(triplets, formula, embeddings, labels, margin, distance, largest_class, backend):
    check_embeddings("embeddings", embeddings)
    check_integers("labels", labels, embeddings.shape[0], embeddings.device)
    check_choice("distance", distance, DISTANCES)
    check_number("margin", margin, tensor=False)
    if largest_class is not None:
        check_count("largest_class", largest_class)
    chosen = pick(backend, embeddings, labels)
    x = unit_rows(embeddings, chosen) if distance == "cosine" else as_float(embeddings)
    labels = as_ids(labels)
    if chosen.name == "eager":
        total, number = formula(distances_of(x, distance), labels, margin)
    else:
        options = float(margin), distance, triplets, largest_class, formula
        total, number = triplet_sum(x, labels, *options, chosen.name)
    # A number that is not finite may be part of no triplet, but it has to show.
    return total / number.clamp(min=1) + 0 * x.detach().abs().amax()


# ---- the specifications on given distances (N, N): every triple at once ----


def _semi_hard(distances, labels, margin):
    """(sum of the terms, number of positive pairs)."""
    positive, negative = _pairs(labels)
    far, near = distances[:, :, None], distances[:, None, :]
    farther = negative[:, None, :] & (near > far)
    nearest = near.masked_fill(~farther, torch.inf).amin(2)
    farthest = distances.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    chosen = torch.where(farther.any(2), nearest, farthest)
    counted = positive & negative.any(1, keepdim=True)
    gaps = torch.where(counted, distances - chosen + margin, 0.0)
    return torch.relu(gaps).sum(), positive.sum()


def _all(distances, labels, margin):
    """(sum of the terms, number of triplets with a term)."""
    positive, negative = _pairs(labels)
    gaps = distances[:, :, None] - distances[:, None, :] + margin
    # A NaN is no less than 0, so that it reaches the loss.
    active = positive[:, :, None] & negative[:, None, :] & ~(gaps <= 0)
    return torch.where(active, gaps, 0.0).sum(), active.sum()


def _pairs(labels):
    """Which pairs (N, N) are positives, and which negatives."""
    same = labels[:, None] == labels
    own = torch.eye(labels.shape[0], dtype=torch.bool, device=labels.device)
    return same & ~own, ~same

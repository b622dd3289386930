"""Triplets of one labelled batch: semi-hard negatives, and all triplets.

    semi-hard: mean over positive pairs (i, p) of relu(d_ip - d_in + margin), with n the nearest
        negative of i farther than p, or its farthest where there is none
    all: mean over the triplets with d_ip - d_in + margin > 0 of that value

d is the Euclidean distance or 1 - cosine. A row without a negative has no triplet: it adds nothing.

Source: Schroff et al. 2015, "FaceNet", section 3.2 (semi-hard); Hermans et al. 2017, "In Defense
of the Triplet Loss", section 2 (batch all). Each has a sum over as many triplets as there are
positive pairs, and more, so its score gradients are dense. They are made a band of rows at a time
in plain torch, from one sort of the row's negatives: neither N x N distances nor a triple of
anything is held, and the gradient of each band is finished while it is there.
"""

from typing import Literal

import torch
from torch import Tensor

from fastsim.backends import pick
from fastsim.checks import check_choice, check_embeddings, check_integers, check_number
from fastsim.losses.batch_hard_triplet import DISTANCES
from fastsim.losses.module import LossModule
from fastsim.operators import once_differentiable
from fastsim.scores import compute_dtype, unit_rows, without_autocast

BAND = 1 << 20  # distances of a band; about ten arrays of that size are alive


def batch_semi_hard_triplet(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 5.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    largest_class: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Semi-hard triplet loss of embeddings (N, D) with integer labels (N,) -> scalar.

    distance: "euclidean" or "cosine" (1 - cosine). A batch without a positive pair or of one
    class gives 0 with zero gradient.
    largest_class: rows that no class has more of. Without it a GPU is waited for once, to say how
        many its largest class has; if a class has more, the loss is NaN.

    ValueError or TypeError for arguments that do not fit.
    """
    total, pairs = _over_bands(
        _semi_hard, embeddings, labels, margin, distance, largest_class, backend
    )
    return total / pairs.clamp(min=1)


def batch_all_triplet(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 5.0,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    largest_class: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mean of the positive triplet losses of embeddings (N, D) with integer labels (N,) -> scalar.

    Parameters and errors as `batch_semi_hard_triplet`.
    """
    total, triplets = _over_bands(
        _all, embeddings, labels, margin, distance, largest_class, backend
    )
    return total / triplets.clamp(min=1)


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


def _over_bands(terms, embeddings, labels, margin, distance, largest_class, backend):
    check_embeddings("embeddings", embeddings)
    check_integers("labels", labels, embeddings.shape[0], embeddings.device)
    check_choice("distance", distance, DISTANCES)
    check_number("margin", margin, tensor=False)
    if largest_class is not None:
        check_number("largest_class", largest_class, positive=True, tensor=False)
    x = _places(embeddings, distance, pick(backend, embeddings))
    classes = _Classes(labels.to(torch.int64), largest_class)
    return _Bands.apply(terms, x, classes, float(margin), distance)


def _places(embeddings, distance, backend):
    """Rows in the compute type between which distances are taken: unit rows, or centred rows."""
    if distance == "cosine":
        return unit_rows(embeddings, backend)
    x = embeddings.to(compute_dtype(embeddings))
    # Distances do not change, and products of centred rows round less.
    return x - x.detach().mean(0)


def _all_distances(x, y, distance):
    """Distances (N, M) of `_places` x (N, D) and y (M, D)."""
    return 1 - x @ y.T if distance == "cosine" else torch.cdist(x, y)


class _Bands(torch.autograd.Function):
    """(sum of terms, their number) of all bands; the forward pass keeps the gradient of the sum."""

    @staticmethod
    def forward(ctx, terms, x, classes, margin, distance):
        grad = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        total, number = classes.unlisted(), classes.first.new_zeros(())
        tall = max(1, BAND // len(x))
        with without_autocast(x.device.type):
            for top in range(0, len(x), tall):
                rows = slice(top, top + tall)
                distances = _all_distances(x[rows], x, distance)
                value, count, score_grad = terms(distances, *classes.of(rows), margin)
                total += value
                number += count
                if grad is not None:
                    _add_gradient(grad, x, rows, distances, score_grad, distance)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(number)
        return total.to(x.dtype), number

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, _):
        return None, grad_total * ctx.saved_tensors[0], None, None, None


def _add_gradient(grad, x, rows, distances, score_grad, distance):
    """Adds what the score gradients dL/dd of a band give to the gradient of x."""
    if distance == "cosine":
        grad[rows].addmm_(score_grad, x, alpha=-1)
        grad.addmm_(score_grad.T, x[rows], alpha=-1)
        return
    # dd_ij / dx_i = (x_i - x_j) / d_ij, 0 at distance 0.
    pull = torch.where(distances > 0, score_grad / distances, 0.0)
    grad[rows].addcmul_(pull.sum(1, keepdim=True), x[rows]).addmm_(pull, x, alpha=-1)
    grad.addcmul_(pull.sum(0)[:, None], x).addmm_(pull.T, x[rows], alpha=-1)


class _Classes:
    """The members of each row's class, as a padded list of columns."""

    def __init__(self, labels, largest):
        self.labels = labels
        self.order = labels.argsort(stable=True)
        ordered = labels[self.order]
        self.first = torch.searchsorted(ordered, labels)
        self.size = torch.searchsorted(ordered, labels, right=True) - self.first
        largest = int(self.size.max()) if largest is None else min(largest, len(labels))
        self.most = torch.arange(largest, device=labels.device)

    def unlisted(self):
        """() float64: 0, or NaN where a class has more members than are listed."""
        more = self.size.max() > len(self.most)
        return torch.zeros_like(more, dtype=torch.float64).masked_fill_(more, torch.nan)

    def of(self, rows):
        """(columns (R, K), which of them are positives, which columns (R, N) are negatives)."""
        first, size = self.first[rows, None], self.size[rows, None]
        columns = self.order[(first + self.most).clamp(max=len(self.order) - 1)]
        own = torch.arange(len(self.labels), device=self.labels.device)[rows, None]
        positive = (self.most < size) & (columns != own)
        return columns, positive, self.labels[rows, None] != self.labels


def _semi_hard(distances, columns, positive, negative, margin):
    far = distances.gather(1, columns)
    ordered, order = distances.masked_fill(~negative, torch.inf).sort(dim=1, stable=True)
    count = negative.sum(1, keepdim=True)
    place = torch.searchsorted(ordered, far, right=True)
    place = torch.where(place < count, place, count - 1)
    chosen = order.gather(1, place.clamp(min=0))
    losses = far - distances.gather(1, chosen) + margin
    # A NaN is no less than 0, so that it reaches the loss.
    active = positive & (count > 0) & ~(losses <= 0)
    ones = active.to(distances.dtype)
    score_grad = torch.zeros_like(distances).scatter_add_(1, columns, ones)
    score_grad.scatter_add_(1, chosen, -ones)
    return torch.where(active, losses, 0.0).sum(dtype=torch.float64), positive.sum(), score_grad


def _all(distances, columns, positive, negative, margin):
    bounds = distances.gather(1, columns) + margin
    ordered = distances.masked_fill(~negative, torch.inf).sort(1).values
    # How many negatives each positive's bound exceeds, and their sum.
    count = torch.searchsorted(ordered, bounds) * positive
    sums = ordered.masked_fill(ordered.isinf(), 0.0).cumsum(1, dtype=torch.float64)
    below = torch.where(count > 0, sums.gather(1, (count - 1).clamp(min=0)), 0.0)
    total = torch.where(positive, count * bounds.double() - below, 0.0).sum()
    # How many positives' bounds exceed each negative.
    ascending = bounds.masked_fill(~positive, -torch.inf).sort(1).values
    above = bounds.shape[1] - torch.searchsorted(ascending, distances, right=True)
    score_grad = (above * negative).neg().to(distances.dtype)
    score_grad.scatter_add_(1, columns, count.to(distances.dtype))
    return total, count.sum(), score_grad

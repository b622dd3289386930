"""Sums over all triplets of a batch with groups, and their gradient, one band of rows at a time.

Most pairs are part of a triplet and have a score gradient. The backend computes the products; the
rest is plain torch, from one sort of each row's negatives. Neither N x N distances nor a list of
triplets exists, and the gradient of a band is finished before the next band.
"""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends import get
from fastsim.backends.bands import numbers_of_a_band
from fastsim.engine.distances import add_products, all_distances, distances_by_products
from fastsim.operators import define, differentiable_again
from fastsim.precision import wide_dtype, widened
from fastsim.ties import highest_equal

BAND = 1 << 20  # distances of a band on a CPU; about ten arrays of this size are alive


def triplet_sum(x, groups, anchors, margin, distance, triplets, largest, formula, backend):
    """(sum () of the terms, their number ()) over the triplets of rows x (N, D).

    anchors: the slice of rows that are anchors; positives and negatives come from all rows.
    distance: "euclidean", or "cosine" for unit rows.
    triplets: "all" or "semi_hard".
    largest: an upper bound of the size of a group, or None; if a group is larger, the sum is NaN.
    formula: (distances (A, N), groups, anchors, margin, distance) -> the same result in plain
        torch, for second derivatives.
    backend: its name.
    """
    options = margin, distance, triplets, largest, formula, backend
    x = x if torch.is_grad_enabled() else x.detach()  # so that no gradient is computed
    return _TripletSum.apply(x, groups, anchors, *options)


def distances_of(x, anchors, distance):
    """The distances (A, N) of a slice of the rows x to all rows, in plain torch, differentiable."""
    if distance == "euclidean":
        return all_distances(x[anchors], x)
    with without_autocast(x.device.type):
        return 1 - x[anchors] @ x.T


def as_far(distances, distance):
    """The largest distances that count as equal to these, as copies of a row round differently.

    A cosine distance has the rounding error of its cosine, however small the distance is.
    """
    return highest_equal(distances, 1.0 if distance == "cosine" else distances)


def _formula(ctx, saved, x):
    groups, (anchors, margin, distance, formula) = saved[1], ctx.call
    return formula(distances_of(x, anchors, distance), groups, anchors, margin, distance)[0]


class _TripletSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, anchors, margin, distance, triplets, largest, formula, backend):
        want = ctx.needs_input_grad[0]
        options = anchors.start, anchors.stop, margin, distance, triplets, largest
        total, number, grad = _triplets(x, groups, *options, want, backend)
        ctx.save_for_backward(x, groups, grad)
        ctx.call = anchors, margin, distance, formula
        ctx.mark_non_differentiable(number)
        return total, number

    @staticmethod
    @differentiable_again(_formula, inputs=1)
    def backward(ctx, saved, grad_total, _):
        return grad_total * saved[2], *(None,) * 8


def _forward(x, groups, start, stop, margin, distance, triplets, largest, want_grad, backend):
    backend, x = get(backend), x.contiguous()
    members, terms = _Members(groups, largest), _TERMS[triplets]
    grad = torch.zeros_like(x) if want_grad else x.new_empty(0)
    total, number = members.nan_if_unlisted(), groups.new_zeros(())
    tall = max(1, numbers_of_a_band(x.device, BAND) // len(x))
    # In the type of sums: a rounded mean would leave large numbers.
    wide = wide_dtype(x.device)
    centred = None if distance == "cosine" else x - x.mean(0, dtype=wide).to(x.dtype)
    with without_autocast(x.device.type):
        products = backend.products(x if centred is None else centred)
        for top in range(start, stop, tall):
            rows = slice(top, min(top + tall, stop))
            if distance == "cosine":
                distances = products(x[rows]).neg_().add_(1)
            else:
                found = distances_by_products(x, centred, rows, products)
                distances = found.values
            value, count, score_grad = terms(distances, *members.of(rows), margin, distance)
            total += value
            number += count
            if not want_grad:
                continue
            if distance == "cosine":
                add_products(grad, score_grad.neg_(), x, rows, backend)
            else:
                found.add_gradient(grad, score_grad, backend)
    return total.to(x.dtype), number, grad


def _fake(x, groups, start, stop, margin, distance, triplets, largest, want_grad, backend):
    grad = x.new_empty(x.shape if want_grad else 0)
    return x.new_empty(()), groups.new_empty(()), grad


_triplets = define(
    "triplets",
    "(Tensor x, Tensor groups, SymInt start, SymInt stop, float margin, str distance,"
    " str triplets, int? largest, bool want_grad, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)


class _Members:
    """The members of each row's group, as a padded list of columns."""

    def __init__(self, groups, largest):
        self.groups = groups
        self.order = groups.argsort(stable=True)
        ordered = groups[self.order]
        self.first = torch.searchsorted(ordered, groups)
        self.size = torch.searchsorted(ordered, groups, right=True) - self.first
        largest = int(self.size.max()) if largest is None else min(largest, len(groups))
        self.places = torch.arange(largest, device=groups.device)

    def nan_if_unlisted(self):
        """() in the type of sums: NaN if a group has more members than are listed, else 0."""
        more = self.size.max() > len(self.places)
        return torch.zeros_like(more, dtype=wide_dtype(more.device)).masked_fill_(more, torch.nan)

    def of(self, rows):
        """(columns (R, K), whether each is a positive, whether each of all columns (R, N) is a
        negative) for a band of rows.
        """
        first, size = self.first[rows, None], self.size[rows, None]
        columns = self.order[(first + self.places).clamp(max=len(self.order) - 1)]
        own = torch.arange(len(self.groups), device=self.groups.device)[rows, None]
        positive = (self.places < size) & (columns != own)
        return columns, positive, self.groups[rows, None] != self.groups


def _semi_hard(distances, columns, positive, negative, margin, distance):
    far = distances.gather(1, columns)
    ordered, order = distances.masked_fill(~negative, torch.inf).sort(dim=1, stable=True)
    count = negative.sum(1, keepdim=True)
    place = torch.searchsorted(ordered, as_far(far, distance), right=True)
    place = torch.where(place < count, place, count - 1)
    chosen = order.gather(1, place.clamp(min=0))
    losses = far - distances.gather(1, chosen) + margin
    # A NaN is no less than 0, so that it reaches the loss.
    active = positive & (count > 0) & ~(losses <= 0)
    ones = active.to(distances.dtype)
    score_grad = torch.zeros_like(distances).scatter_add_(1, columns, ones)
    score_grad.scatter_add_(1, chosen, -ones)
    total = _sum(torch.where(active, widened(losses), 0.0))
    return total, positive.sum(), score_grad


def _all(distances, columns, positive, negative, margin, _):
    bounds = distances.gather(1, columns) + margin
    ordered = distances.masked_fill(~negative, torch.inf).sort(1).values
    # How many negatives each positive's bound exceeds, and their sum.
    count = torch.searchsorted(ordered, bounds) * positive
    sums = ordered.masked_fill(ordered.isinf(), 0.0).cumsum(1, dtype=wide_dtype(ordered.device))
    below = torch.where(count > 0, sums.gather(1, (count - 1).clamp(min=0)), 0.0)
    total = _sum(torch.where(positive, count * widened(bounds) - below, 0.0))
    # How many positives' bounds exceed each negative.
    ascending = bounds.masked_fill(~positive, -torch.inf).sort(1).values
    above = bounds.shape[1] - torch.searchsorted(ascending, distances, right=True)
    score_grad = (above * negative).neg().to(distances.dtype)
    score_grad.scatter_add_(1, columns, count.to(distances.dtype))
    return total, count.sum(), score_grad


def _sum(terms):
    """The sum of terms (R, K), in an order that does not depend on the number of threads."""
    return terms.sum(1).sum()


_TERMS = {"all": _all, "semi_hard": _semi_hard}

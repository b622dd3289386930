"""Euclidean distances of all pairs, exact even for rows that nearly coincide.

|x - y|^2 = |x|^2 + |y|^2 - 2 x . y costs one matrix product. For two rows close to each other,
however, only the rounding errors of the squares remain. The distances and gradients of such pairs
are computed from the difference of the rows instead.
"""

from typing import NamedTuple

import torch

from fastsim.backends.rows import add_rows, norms
from fastsim.operators import differentiable_again, transforming
from fastsim.precision import widened

# A pair is close if |x - y|^2 < CLOSE (|x|^2 + |y|^2). For every other pair the relative error of
# the distance is at most 1 / (2 CLOSE) times that of the squares.
CLOSE = 0.25
EXACT = "donot_use_mm_for_euclid_dist"
CHUNK = 1 << 20  # elements of the differences in memory at once


def all_distances(x, y):
    """|x_i - y_j| (N, M) of x (N, D) and y (M, D), from the differences, differentiable."""
    if transforming(x, y):
        return norms(x[:, None] - y)
    if torch.compiler.is_compiling():
        return torch.cdist(x, y, compute_mode=EXACT)
    return _AllDistances.apply(x, y)


class _AllDistances(torch.autograd.Function):
    """torch.cdist from differences. Its gradient is not differentiable; that of the formula is."""

    @staticmethod
    def forward(ctx, x, y):
        distances = torch.cdist(x, y, compute_mode=EXACT)
        ctx.save_for_backward(x, y, distances)
        return distances

    @staticmethod
    @differentiable_again(lambda ctx, saved, x, y: norms(x[:, None] - y), inputs=2)
    def backward(ctx, saved, grad):
        x, y, distances = saved
        grads, turned = (grad.contiguous(), distances), (grad.T.contiguous(), distances.T)
        found = []
        for (above, gaps), sides, want in zip(
            (grads, turned), ((x, y), (y, x)), ctx.needs_input_grad, strict=True
        ):
            back = torch.ops.aten._cdist_backward
            found.append(back(above, *sides, 2.0, gaps.contiguous()) if want else None)
        return tuple(found)


class Distances(NamedTuple):
    """The distances (R, N) of a slice of the rows x to all rows, and which pairs are close.

    centred: x minus its mean, whose products have smaller rounding errors.
    close: (rows within the slice, columns) of the close pairs; None if listing them would mean
        waiting for the device.
    """

    x: torch.Tensor
    centred: torch.Tensor
    rows: slice
    values: torch.Tensor
    close: tuple | None

    def add_gradient(self, grad, score_grad, backend):
        """Adds dL/dx to `grad`, from dL/dvalues (R, N), which is overwritten."""
        # dd_ij / dx_i = (x_i - x_j) / d_ij, 0 at distance 0.
        rows = self.rows
        if self.close is None:
            # In float64, where close rows need no exception.
            x, pull = widened(self.x), _over(widened(score_grad), widened(self.values))
            grad[rows] += (pull.sum(1, keepdim=True) * x[rows] - pull @ x).to(grad.dtype)
            grad += (pull.sum(0)[:, None] * x - pull.T @ x[rows]).to(grad.dtype)
            return
        of_close, distances = score_grad[self.close], self.values[self.close]
        score_grad[self.close] = 0.0
        pull, x = _over(score_grad, self.values), self.centred
        grad[rows].addcmul_(pull.sum(1, keepdim=True), x[rows])
        grad.addcmul_(pull.sum(0)[:, None], x)
        add_products(grad, pull.neg_(), x, rows, backend)
        some = ((of_close != 0) & (distances > 0)).nonzero()[:, 0]
        of_close, distances = of_close[some, None], distances[some, None]
        of_rows, of_columns = (side[some] for side in self.close)
        for part in _parts(some, x.shape[1]):
            mine, theirs = of_rows[part] + rows.start, of_columns[part]
            # The difference is divided first: 1 / d overflows for a subnormal d.
            gaps = _gaps(self.x, mine, theirs).div_(distances[part]).mul_(of_close[part])
            add_rows(grad, mine, gaps)
            add_rows(grad, theirs, gaps.neg_())


def distances_by_products(x, centred, rows, products):
    """The `Distances` of the slice `rows` of x (N, D).

    products: `Backend.products` of the centred rows.
    """
    if not _listable(x):
        values = torch.cdist(x[rows], x, compute_mode=EXACT)
        return Distances(x, centred, rows, values, None)
    squares = centred.square().sum(1)
    both = squares[rows, None] + squares
    values = products(centred[rows]).mul_(-2).add_(both)
    close = (values < CLOSE * both).nonzero().unbind(1)
    values = values.clamp_(min=0).sqrt_()
    for part in _parts(close[0], x.shape[1]):
        mine, theirs = (side[part] for side in close)
        gaps = _gaps(x, mine + rows.start, theirs)
        values[mine, theirs] = torch.linalg.vector_norm(gaps, dim=1)
    return Distances(x, centred, rows, values, close)


def add_products(grad, score_grad, x, rows, backend):
    """Adds dL/dx to `grad` (N, D), from dL/dscores (R, N) of some rows of x with all rows."""
    backend.multiply(score_grad, x, grad[rows], accumulate=True)
    backend.multiply(score_grad.t(), x[rows], grad, accumulate=True)


def _listable(x):
    """Whether close pairs can be listed without waiting for the device."""
    return x.device.type == "cpu"


def _over(score_grad, distances):
    """`score_grad` / `distances` in the memory of the former, 0 at distance 0."""
    return score_grad.div_(distances).masked_fill_(~(distances > 0), 0.0)


def _gaps(x, one, other):
    return x.index_select(0, one).sub_(x.index_select(0, other))


def _parts(pairs, width):
    """Slices of a list of pairs whose differences fit into CHUNK."""
    size = max(1, CHUNK // width)
    return [slice(first, first + size) for first in range(0, len(pairs), size)]

"""Unit rows and their scores: cosines of all pairs, cosines of paired rows, the best k."""

import torch
from torch import Tensor

from fastsim.autocast import without_autocast
from fastsim.backends import get, pick
from fastsim.checks import check_alike, check_embeddings, check_sides, int_of
from fastsim.operators import define, differentiable_again, transforming
from fastsim.precision import compute_dtype, widened


def unit_rows(x, backend):
    """The rows x / |x| in the compute type, differentiable; a zero row stays 0, with gradient 0."""
    if backend.name == "eager" or transforming(x):
        return unit_formula(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _UnitRows.apply(x, backend.name)
    return _unit_rows(x, backend.name)[0]


def unit_formula(x):
    """`unit_rows` in plain torch."""
    x = x.to(compute_dtype(x))
    norm = torch.linalg.vector_norm(widened(x), dim=-1, keepdim=True)
    zero = norm < torch.finfo(x.dtype).tiny
    return x * torch.where(zero, 0.0, 1 / norm.masked_fill(zero, 1.0)).to(x.dtype)


def paired(unit_x, unit_y):
    """Dot products of paired rows: (N, D), (N, D) -> (N,)."""
    return (unit_x * unit_y).sum(-1)


def paired_cosines(x, y, backend):
    """Cosines (N,) of paired rows x, y (N, D) of one compute type, differentiable."""
    if backend.name == "eager" or transforming(x, y):
        return paired(unit_rows(x, backend), unit_rows(y, backend))
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return _PairedCosines.apply(x, y, backend.name)
    return _paired_cosines(x, y, backend.name)[0]


def dense_cosines(x, y, backend):
    """Cosines (N, M) of all pairs of rows, in the compute type; y None: x with itself."""
    unit_x = unit_rows(x, backend)
    unit_y = unit_x if y is None or y is x else unit_rows(y, backend)
    with without_autocast(x.device.type):
        return unit_x @ unit_y.T


def dense_scores(x, y, backend, similarity):
    """Cosines or dot products (N, M) of all pairs of rows, as `dense_cosines`."""
    if similarity == "cosine":
        return dense_cosines(x, y, backend)
    x = x.to(compute_dtype(x))
    with without_autocast(x.device.type):
        return x @ (x if y is None else y.to(x.dtype)).T


def paired_scores(x, y, backend, similarity):
    """Cosines or dot products (N,) of paired rows x, y (N, D) of one compute type."""
    return paired_cosines(x, y, backend) if similarity == "cosine" else paired(x, y)


def cosine_similarity(x: Tensor, y: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Computes the cosines of all pairs of rows.

    The result is the N x M matrix; `top_k` and most losses never hold it.

    Args:
        x: (N, D).
        y: (M, D); None: x with itself.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (N, M), float32 for inputs of 32 bits or fewer, float64 for float64; differentiable. A zero
        row has cosine 0 with everything and gradient 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> fastsim.cosine_similarity(torch.tensor([[3.0, 4.0]]), torch.eye(2))
        tensor([[0.6000, 0.8000]])
    """
    check_embeddings("x", x)
    if y is not None:
        check_embeddings("y", y)
        check_alike("y", y, "x", x)
    return dense_cosines(x, y, pick(backend, x, y))


def paired_cosine_similarity(x: Tensor, y: Tensor, *, backend: str | None = None) -> Tensor:
    """Computes the cosine of row i of x with row i of y, without an N x N matrix.

    Args:
        x, y: (N, D); N = 0 is allowed, since one rank of a group may have no rows.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (N,); dtype and zero rows as in `cosine_similarity`; differentiable.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> fastsim.paired_cosine_similarity(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.6000])
    """
    check_embeddings("x", x, empty=True)
    check_embeddings("y", y, empty=True)
    check_alike("y", y, "x", x, rows=True)
    return paired_cosines(x, y, pick(backend, x, y))


def top_k(
    queries: Tensor, corpus: Tensor, k: int, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Finds the k most similar rows of the corpus for each query, without the N x M matrix.

    Args:
        queries: (N, D).
        corpus: (M, D).
        k: an int, 1 to M.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (values (N, k) in descending order, indices (N, k) int64); among equal values the earlier
        row comes first. Not differentiable.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> fastsim.top_k(torch.tensor([[3.0, 4.0]]), torch.eye(2), k=1)
        (tensor([[0.8000]]), tensor([[1]]))
    """
    check_sides("corpus", corpus, "queries", queries)
    k = int_of("k", k)
    if not 1 <= k <= corpus.shape[0]:
        raise ValueError(f"k: wanted 1 to {corpus.shape[0]} (rows of corpus), got {k}")
    chosen = pick(backend, queries, corpus)
    with torch.no_grad():
        if chosen.name == "eager":
            scores = dense_cosines(queries, corpus, chosen)
            values, indices = scores.sort(dim=1, descending=True, stable=True)
            return values[:, :k].contiguous(), indices[:, :k].contiguous()
        return _top_k(queries, corpus, k, chosen.name)


# ---- the best k as a registered operator ----


def _top_k_forward(queries, corpus, k, backend):
    with without_autocast(queries.device.type):
        return get(backend).top_k(queries, corpus, k)


def _top_k_fake(queries, corpus, k, backend):
    shape = queries.shape[0], k
    values = queries.new_empty(shape, dtype=compute_dtype(queries))
    return values, queries.new_empty(shape, dtype=torch.int64)


_top_k = define(
    "top_k",
    "(Tensor queries, Tensor corpus, int k, str backend) -> (Tensor, Tensor)",
    _top_k_forward,
    _top_k_fake,
)


# ---- unit rows of a compiled backend as a registered operator ----


def _unit_forward(x, backend):
    return get(backend).unit_rows(x, dtype=compute_dtype(x))


def _unit_forward_fake(x, backend):
    dtype = compute_dtype(x)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=dtype)


def _unit_backward(grad_unit, x, inverse, backend):
    one = inverse.new_ones(())
    return get(backend).unit_rows_backward(grad_unit.contiguous(), x, inverse, one, x.dtype)[0]


def _unit_backward_fake(grad_unit, x, inverse, backend):
    return x.new_empty(x.shape)


_unit_rows = define(
    "unit_rows", "(Tensor x, str backend) -> (Tensor, Tensor)", _unit_forward, _unit_forward_fake
)
_unit_rows_backward = define(
    "unit_rows_backward",
    "(Tensor grad_unit, Tensor x, Tensor inverse, str backend) -> Tensor",
    _unit_backward,
    _unit_backward_fake,
)


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backend):
        unit, inverse = _unit_rows(x, backend)
        ctx.save_for_backward(x, inverse)
        ctx.backend = backend
        return unit

    @staticmethod
    @differentiable_again(lambda ctx, _, x: unit_formula(x), inputs=1)
    def backward(ctx, saved, grad_unit):
        return _unit_rows_backward(grad_unit, *saved, ctx.backend), None


# ---- cosines of paired rows as a registered operator ----


def _paired_forward(x, y, backend):
    return get(backend).paired_cosines(x, y)


def _paired_forward_fake(x, y, backend):
    dtype = compute_dtype(x)
    return x.new_empty(x.shape[0], dtype=dtype), x.new_empty(2, x.shape[0], dtype=dtype)


def _paired_backward(grad, x, y, cosines, inverse, needs_grad, backend):
    grad = grad.contiguous()
    return get(backend).paired_cosines_backward(grad, x, y, cosines, inverse, needs_grad)


def _paired_backward_fake(grad, x, y, cosines, inverse, needs_grad, backend):
    grad_x, grad_y = (
        t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, y), needs_grad, strict=True)
    )
    return grad_x, grad_y


_paired_cosines = define(
    "paired_cosines",
    "(Tensor x, Tensor y, str backend) -> (Tensor, Tensor)",
    _paired_forward,
    _paired_forward_fake,
)
_paired_cosines_backward = define(
    "paired_cosines_backward",
    "(Tensor grad, Tensor x, Tensor y, Tensor cosines, Tensor inverse, bool[] needs_grad,"
    " str backend) -> (Tensor, Tensor)",
    _paired_backward,
    _paired_backward_fake,
)


class _PairedCosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, backend):
        cosines, inverse = _paired_cosines(x, y, backend)
        ctx.save_for_backward(x, y, cosines, inverse)
        ctx.backend = backend
        return cosines

    @staticmethod
    @differentiable_again(lambda ctx, _, x, y: paired(unit_formula(x), unit_formula(y)), inputs=2)
    def backward(ctx, saved, grad):
        needs_grad = list(ctx.needs_input_grad[:2])
        grads = _paired_cosines_backward(grad, *saved, needs_grad, ctx.backend)
        return *(g if wanted else None for g, wanted in zip(grads, needs_grad, strict=True)), None

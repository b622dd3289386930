"""Rows against the few columns chosen for each, as registered operators with a gradient."""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends import get
from fastsim.backends import rows as formulas
from fastsim.operators import define, differentiable_again


def partner_distances(x, y, columns, missing, backend, known=None):
    """|x_i - y_j| (K, N) with j = columns[k, i], for x (N, D) and y (M, D) or None for x itself.

    missing: K numbers, the values where the column is negative.
    known: the distances, if the search for the columns has computed them.

    The gradient of a distance of 0 is 0.
    """
    if known is not None and not (torch.is_grad_enabled() and x.requires_grad):
        return known
    return _Partners.apply(x, y, columns, True, missing, backend.name, known)


def partner_products(x, y, columns, missing, backend):
    """x_i . y_j (K, N); the rest as in `partner_distances`."""
    return _Partners.apply(x, y, columns, False, missing, backend.name, None)


def row_terms(x, y, columns, first, backend):
    """The scores that a triplet loss needs, from unit rows x (N, D) and y (M, D), M >= N.

    Returns (x_i . y_{first + i}, x_i . y_columns[i]) as (2, N) and x_i . sum_j y_j as (N,). A
    negative column means none; its score is 0. One function computes all three, so that the
    backward pass holds one gradient of each side instead of three.
    """
    return _RowTerms.apply(x, y, columns, first, backend.name)


class _Partners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, columns, distances, missing, backend, known):
        values = known
        if known is None:
            values = _chosen_rows(x, y, columns, distances, missing, backend)
        ctx.save_for_backward(x, y, columns, values)
        ctx.call = distances, backend
        ctx.missing = missing
        return values

    @staticmethod
    @differentiable_again(
        lambda ctx, saved, x, y: formulas.chosen_rows(x, y, saved[2], ctx.call[0], ctx.missing),
        inputs=2,
    )
    def backward(ctx, saved, grad):
        needs_grad = ctx.needs_input_grad[:2]
        distances, backend = ctx.call
        x, y, columns, values = saved
        grads = _chosen_rows_backward(grad, values, x, y, columns, distances, *needs_grad, backend)
        return *_needed(grads, needs_grad), *(None,) * 5


class _RowTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, columns, first, backend):
        ctx.save_for_backward(x, y, columns)
        ctx.call = first, backend
        return _row_terms(x, y, columns, first, backend)

    @staticmethod
    @differentiable_again(
        lambda ctx, saved, x, y: formulas.row_terms(x, y, saved[2], ctx.call[0]),
        inputs=2,
    )
    def backward(ctx, saved, grad_pairs, grad_sums):
        needs_grad = ctx.needs_input_grad[:2]
        first, backend = ctx.call
        grads = _row_terms_backward(grad_pairs, grad_sums, *saved, first, *needs_grad, backend)
        return *_needed(grads, needs_grad), None, None, None


def _needed(grads, needs_grad):
    return (grad if need else None for grad, need in zip(grads, needs_grad, strict=True))


# ---- the registered operators; a gradient that is not needed is empty ----


def _empty_for_none(x, grads):
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _grads_fake(x, y, need_x, need_y):
    return x.new_empty(x.shape if need_x else 0), x.new_empty(y.shape if need_y else 0)


def _chosen_rows_forward(x, y, columns, distances, missing, backend):
    with without_autocast(x.device.type):
        return get(backend).chosen_rows(x, y, columns, distances, missing)


def _chosen_rows_fake(x, y, columns, distances, missing, backend):
    return x.new_empty(columns.shape)


def _chosen_rows_back(grad, values, x, y, columns, distances, need_x, need_y, backend):
    needs_grad = need_x, need_y
    with without_autocast(x.device.type):
        grads = get(backend).chosen_rows_backward(
            grad, values, x, y, columns, distances, needs_grad
        )
    return _empty_for_none(x, grads)


def _chosen_rows_back_fake(grad, values, x, y, columns, distances, need_x, need_y, backend):
    return _grads_fake(x, y, need_x, need_y)


def _row_terms_forward(x, y, columns, first, backend):
    with without_autocast(x.device.type):
        return get(backend).row_terms(x, y, columns, first)


def _row_terms_fake(x, y, columns, first, backend):
    return x.new_empty(2, x.shape[0]), x.new_empty(x.shape[0])


def _row_terms_back(grad_pairs, grad_sums, x, y, columns, first, need_x, need_y, backend):
    grads, needs_grad = (grad_pairs, grad_sums), (need_x, need_y)
    with without_autocast(x.device.type):
        found = get(backend).row_terms_backward(*grads, x, y, columns, first, needs_grad)
    return _empty_for_none(x, found)


def _row_terms_back_fake(grad_pairs, grad_sums, x, y, columns, first, need_x, need_y, backend):
    return _grads_fake(x, y, need_x, need_y)


_chosen_rows = define(
    "chosen_rows",
    "(Tensor x, Tensor? y, Tensor columns, bool distances, float[] missing, str backend) -> Tensor",
    _chosen_rows_forward,
    _chosen_rows_fake,
)
_chosen_rows_backward = define(
    "chosen_rows_backward",
    "(Tensor grad, Tensor values, Tensor x, Tensor? y, Tensor columns, bool distances,"
    " bool need_x, bool need_y, str backend) -> (Tensor, Tensor)",
    _chosen_rows_back,
    _chosen_rows_back_fake,
)
_row_terms = define(
    "row_terms",
    "(Tensor x, Tensor y, Tensor columns, int first, str backend) -> (Tensor, Tensor)",
    _row_terms_forward,
    _row_terms_fake,
)
_row_terms_backward = define(
    "row_terms_backward",
    "(Tensor grad_pairs, Tensor grad_sums, Tensor x, Tensor y, Tensor columns, int first,"
    " bool need_x, bool need_y, str backend) -> (Tensor, Tensor)",
    _row_terms_back,
    _row_terms_back_fake,
)

"""Functions of rows in plain torch, a band of rows at a time.

What torch keeps for the gradient of a few operations on N x D numbers is several times these. Here
the inputs are kept, and the function is called once more for the gradient, with a few rows at a
time. Each row's result is that of all rows at once.
"""

import torch

from fastsim.backends.bands import bands
from fastsim.backends.rows import add_rows, take_rows
from fastsim.operators import differentiable_again, traced, transforming
from fastsim.precision import widened

BAND = 1 << 16  # numbers of a side, on a CPU: with all that is made of them they stay in a cache


def by_bands(function, x, y=None, shared=None, *, index=None, summed=False):
    """function(x, y, shared), or with `index` function(x, y[index], shared), differentiable.

    function: (band of x, band of y or None, shared) -> one result a row, or with `summed` one that
        is added up over the bands. x is (N, ...), y the same or with `index` (M, ...); `shared`, a
        tensor or None, is given whole.
    index: (N,) rows of y, some of them or all, in any order.
    """
    if traced() or transforming(x, y, shared) or not len(x):
        return function(x, _taken(y, index), shared)
    return _ByBands.apply(x, y, shared, index, function, summed)


def _taken(y, index):
    return y if index is None else take_rows(y, index)


def _bands(x, y, index):
    """The bands of rows, by the larger of two sides that are cut alike."""
    larger = y is not None and index is None and y.numel() > x.numel()
    return bands(y if larger else x, BAND)


def _band(x, y, index, rows):
    """x and y of a band."""
    if y is None:
        return x[rows], None
    return x[rows], y[rows] if index is None else y.index_select(0, index[rows])


def _formula(ctx, saved, x, y, shared):
    return ctx.function(x, _taken(y, saved[3]), shared)


class _ByBands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, shared, index, function, summed):
        ctx.save_for_backward(x, y, shared, index)
        ctx.function, ctx.summed = function, summed
        whole = None
        for rows in _bands(x, y, index):
            result = function(*_band(x, y, index, rows), shared)
            if summed:
                whole = result if whole is None else whole.add_(result)
                continue
            if whole is None:  # at once: what is kept between bands would leave holes in the memory
                whole = result.new_empty(len(x), *result.shape[1:])
            whole[rows] = result
        return whole

    @staticmethod
    @differentiable_again(_formula, inputs=3)
    def backward(ctx, saved, grad):
        x, y, shared, index = saved
        wants = ctx.needs_input_grad[:3]
        grads = [
            torch.empty_like(x) if wants[0] else None,
            _memory(y, index) if wants[1] else None,
            torch.zeros_like(widened(shared)) if wants[2] else None,
        ]
        for rows in _bands(x, y, index):
            given = *_band(x, y, index, rows), shared
            above = grad if ctx.summed else grad[rows]
            found = iter(_gradients(ctx.function, given, wants, above))
            if wants[0]:
                grads[0][rows] = next(found)
            if wants[1] and index is None:
                grads[1][rows] = next(found)
            elif wants[1]:
                add_rows(grads[1], index[rows], next(found).to(grads[1].dtype))
            if wants[2]:
                grads[2] += next(found)
        if wants[1]:
            grads[1] = grads[1].to(y.dtype)
        if wants[2]:
            grads[2] = grads[2].to(shared.dtype)
        return *grads, None, None, None


def _memory(y, index):
    """Memory for the gradient of y. Many rows of x may add to one of y: too many for 16 bits."""
    if index is None:
        return torch.empty_like(y)
    return torch.zeros_like(y, dtype=torch.promote_types(y.dtype, torch.float32))


def _gradients(function, given, wants, above):
    """The gradients of those of a band's inputs that are wanted."""
    with torch.enable_grad():
        given = [
            value.detach().requires_grad_() if want else value
            for value, want in zip(given, wants, strict=True)
        ]
        result = function(*given)
    wanted = [value for value, want in zip(given, wants, strict=True) if want]
    return torch.autograd.grad(result, wanted, above)

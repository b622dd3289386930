"""Functions of rows in plain torch, computed one band of rows at a time to save memory.

For the gradient of a few operations on an N x D tensor torch keeps several tensors of that size.
Here only the inputs are kept, and the backward pass calls the function again, band by band. The
result of each row is the same as with all rows at once.
"""

import torch

from fastsim.backends.bands import bands
from fastsim.backends.rows import add_rows, take_rows
from fastsim.operators import differentiable_again, traced, transforming
from fastsim.precision import compute_dtype, widened

BAND = 1 << 16  # elements of a band on a CPU: they and what is computed from them stay in cache


def by_bands(function, x, y=None, shared=None, *, index=None, summed=False):
    """function(x, y, shared), or with `index` function(x, y[index], shared), differentiable.

    function: (band of x, band of y or None, shared) -> one result for each row, or with `summed`
        one result, which is added up over the bands.
    x: (N, ...).
    y: (N, ...), with `index` (M, ...), or None.
    shared: a tensor or None, passed to every call as it is.
    index: (N,) rows of y, in any order.
    """
    if traced() or transforming(x, y, shared) or not len(x):
        return function(x, _taken(y, index), shared)
    return _ByBands.apply(x, y, shared, index, function, summed)


def _taken(y, index):
    return y if index is None else take_rows(y, index)


def _bands(x, y, index):
    """The bands of rows; their height follows from the larger of the sides that are cut."""
    larger = y is not None and index is None and y.numel() > x.numel()
    return bands(y if larger else x, BAND)


def _band(x, y, index, rows):
    """The rows of x and y that belong to a band."""
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
        results = None
        for rows in _bands(x, y, index):
            result = function(*_band(x, y, index, rows), shared)
            if summed:
                results = result if results is None else results.add_(result)
                continue
            if results is None:  # one allocation: many small ones would fragment the memory
                results = result.new_empty(len(x), *result.shape[1:])
            results[rows] = result
        return results

    @staticmethod
    @differentiable_again(_formula, inputs=3)
    def backward(ctx, saved, grad):
        x, y, shared, index = saved
        needs_grad = ctx.needs_input_grad[:3]
        grads = [
            torch.empty_like(x) if needs_grad[0] else None,
            _memory(y, index) if needs_grad[1] else None,
            torch.zeros_like(widened(shared)) if needs_grad[2] else None,
        ]
        for rows in _bands(x, y, index):
            given = *_band(x, y, index, rows), shared
            above = grad if ctx.summed else grad[rows]
            found = iter(_gradients(ctx.function, given, needs_grad, above))
            if needs_grad[0]:
                grads[0][rows] = next(found)
            if needs_grad[1] and index is None:
                grads[1][rows] = next(found)
            elif needs_grad[1]:
                add_rows(grads[1], index[rows], next(found).to(grads[1].dtype))
            if needs_grad[2]:
                grads[2] += next(found)
        if needs_grad[1]:
            grads[1] = grads[1].to(y.dtype)
        if needs_grad[2]:
            grads[2] = grads[2].to(shared.dtype)
        return *grads, None, None, None


def _memory(y, index):
    """Memory for the gradient of y. With an index many rows are added up, so not in 16 bits."""
    if index is None:
        return torch.empty_like(y)
    return torch.zeros_like(y, dtype=compute_dtype(y))


def _gradients(function, given, needs_grad, above):
    """The gradients of the inputs of a band that need one."""
    with torch.enable_grad():
        given = [
            value.detach().requires_grad_() if want else value
            for value, want in zip(given, needs_grad, strict=True)
        ]
        result = function(*given)
    wanted = [value for value, want in zip(given, needs_grad, strict=True) if want]
    return torch.autograd.grad(result, wanted, above)

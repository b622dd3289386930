"""Losses that take several passes over scores, as a formula on their matrix where it is small.

A loss that one pass makes is one call of the backend where the batch is small. One that takes
several would be several calls and what lies between them, which take longer than plain torch on the
matrix of scores. The matrix is the backend's own, so that the same input still gives the same bits
with any number of threads.
"""

import torch

from fastsim.backends import get
from fastsim.operators import differentiable_again, traced
from fastsim.scores import dense_cosines


def serves_dense(rows, columns, backend):
    """Whether the formula on a matrix of so many scores is what the backend takes."""
    return not traced() and rows * columns <= backend.most_dense


def cosines_of(x, y, backend):
    """Cosines (N, M) of rows x (N, D) and y (M, D) in the compute type, differentiable."""
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return _Cosines.apply(x, y, backend.name)
    return backend.cosines(x, y)


class _Cosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, backend):
        ctx.save_for_backward(x, y)
        ctx.backend = backend
        return get(backend).cosines(x, y)

    @staticmethod
    @differentiable_again(lambda ctx, x, y: dense_cosines(x, y, get("eager")), inputs=2)
    def backward(ctx, grad):
        sides, wants = ctx.saved_tensors, ctx.needs_input_grad[:2]
        grads = get(ctx.backend).cosines_backward(grad, *sides, wants)
        in_type = (
            g if g is None else g.to(side.dtype) for g, side in zip(grads, sides, strict=True)
        )
        return *in_type, None

"""Losses that take several passes over scores, as a formula on their matrix where it is small.

A loss that one pass makes is one call of the backend where the batch is small. One that takes
several would be several calls and what lies between them, which take longer than plain torch on the
matrix of scores. The matrix is the backend's own, so that the same input still gives the same bits
with any number of threads.
"""

import torch

from fastsim.backends import get
from fastsim.operators import differentiable_again, traced


def serves_dense(rows, columns, backend):
    """Whether the formula on a matrix of so many scores is what the backend takes."""
    return not traced() and rows * columns <= backend.most_dense


def scores_of(unit_x, unit_y, backend):
    """Scores (N, M) of rows of the compute type, differentiable."""
    if torch.is_grad_enabled() and (unit_x.requires_grad or unit_y.requires_grad):
        return _Scores.apply(unit_x, unit_y, backend.name)
    return backend.all_scores(unit_x, unit_y)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, backend):
        ctx.save_for_backward(x, y)
        ctx.backend = backend
        return get(backend).all_scores(x, y)

    @staticmethod
    @differentiable_again(lambda ctx, x, y: x @ y.T, inputs=2)
    def backward(ctx, grad):
        wants = ctx.needs_input_grad[:2]
        grads = get(ctx.backend).all_scores_backward(grad, *ctx.saved_tensors, wants)
        return *grads, None

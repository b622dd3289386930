"""A tile loss computed by one call of the backend, as one differentiable operation.

It does without a registered operator, whose arguments would take longer than a small loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.backends.base import Backend
from fastsim.batch_metrics import empty_totals, in_metrics, record_totals
from fastsim.engine.gradients import (
    as_scalar,
    dense_losses,
    gradients_of,
    graph_ends,
    is_one,
    needs_grad_of,
    sum_of_prefixes,
)
from fastsim.engine.one_call import in_one_call, one_call_serves
from fastsim.engine.sweep import asked_widths
from fastsim.operators import differentiable_again, traced
from fastsim.precision import compute_dtype
from fastsim.tile_loss import TileLoss

_NO_GRADIENT = (False,) * 4  # of x, y, scale and bias
_INPUTS = 11  # of `_OneCallLossFunction`


class OneCallLoss(NamedTuple):
    """A loss of x (N, D) and y (M, D), or of x with itself, by one call of the backend."""

    tile: TileLoss
    scale: float | Tensor
    bias: float | Tensor
    weights: float | Tensor | None
    formula: Callable
    backend: Backend
    for_metrics: bool  # whether `fastsim.metrics` counts these scores
    prefixes: tuple | None = None  # (widths, factors) as in `Backend.in_one_call`

    def serves(self, x, y):
        """Whether one call serves x and y, and no registered operator is needed.

        Only torch.compile needs the operator. For a small batch, passing its arguments takes longer
        than the loss itself.
        """
        if traced():
            return False
        (rows, width), columns = x.shape, (x if y is None else y).shape[0]
        sizes = rows, columns, width, y is None, x.dtype
        with_metrics = self.for_metrics and in_metrics()
        options = self.weights, self.backend
        return one_call_serves(self.tile, *sizes, *options, with_metrics=with_metrics)

    def kept(self, given):
        """The loss as a function of x, y and the tensors of a `Given`. It holds none of these."""
        if not given.tensors:
            return self
        fields, names = given.fields, given.names
        others = {name: value for name, value in self._asdict().items() if name not in names}

        def loss(x, y, *tensors):
            return OneCallLoss(**others, **fields(x, *tensors))(x, y)

        return loss

    def __call__(self, x, y):
        y = None if y is x else y
        if self.prefixes is not None:
            asked_widths().served = True
        if not self.for_metrics or not in_metrics():
            return self._of(x, y, None)
        totals = empty_totals(x.device)
        loss = self._of(x, y, totals)
        record_totals(totals)
        return loss

    def _of(self, x, y, totals):
        tile, scale, bias, weights, formula, backend, _, prefixes = self
        if isinstance(scale, Tensor):
            scale = as_scalar(scale, compute_dtype(x), x.device)
        if isinstance(bias, Tensor):
            bias = as_scalar(bias, compute_dtype(x), x.device)
        given = x, y, scale, bias, weights
        if not torch.is_grad_enabled():
            return in_one_call(tile, *given, _NO_GRADIENT, backend, totals, prefixes)[0]
        needs_grad = needs_grad_of(x, y, scale, bias)
        if not any(needs_grad):
            return in_one_call(tile, *given, _NO_GRADIENT, backend, totals, prefixes)[0]
        return _OneCallLossFunction.apply(
            *given, tile, needs_grad, formula, backend, totals, prefixes
        )


def _formula(ctx, saved, *sides):
    """The loss in plain torch, summed over prefixes if there are any.

    sides: x, y, scale and bias; None stands for a number, which `ctx.numbers` holds.
    """
    *numbers, weight = ctx.numbers
    x, y, *scalars = (n if t is None else t for t, n in zip(sides, numbers, strict=True))
    weights = saved[4] if weight is None else weight

    def loss(x, y):
        return (dense_losses(ctx, x, y, *scalars) * weights).sum()

    return loss(x, y) if ctx.prefixes is None else sum_of_prefixes(loss, x, y, *ctx.prefixes)


class _OneCallLossFunction(torch.autograd.Function):
    """A `OneCallLoss` that needs a gradient."""

    @staticmethod
    def forward(
        ctx, x, y, scale, bias, weights, tile, needs_grad, formula, backend, totals, prefixes
    ):
        given = x, y, scale, bias, weights
        loss, *found = in_one_call(tile, *given, needs_grad, backend, totals, prefixes)
        tensors = [value if isinstance(value, Tensor) else None for value in given]
        ctx.numbers = [
            value if tensor is None else None for value, tensor in zip(given, tensors, strict=True)
        ]
        ctx.dtypes, ctx.needs_grad = (x.dtype, loss.dtype), needs_grad
        ctx.formula, ctx.cosine, ctx.backend, ctx.tile = formula, tile.cosine, backend, tile
        ctx.prefixes = prefixes
        ctx.save_for_backward(*tensors, *found)
        return loss

    @staticmethod
    @differentiable_again(_formula, inputs=4)
    def backward(ctx, saved, grad):
        tensors, found = saved[:5], saved[5:]
        pairs = zip(tensors, ctx.numbers, strict=True)
        given = [number if tensor is None else tensor for tensor, number in pairs]
        spent = graph_ends()
        grad = None if spent and is_one(grad) else grad
        parts = ctx.backend.one_call_gradients(
            ctx.tile, grad, found, given, ctx.needs_grad, ctx.dtypes[0], spent=spent
        )
        return gradients_of(ctx, parts, _INPUTS)

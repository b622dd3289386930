"""A tile loss that one call of the backend makes, as one differentiable operation.

No operator of torch's: of a small batch its arguments would take longer than the loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.backends.base import Backend
from fastsim.batch_metrics import no_totals, record_totals, watched
from fastsim.engine.gradients import (
    as_scalar,
    dense_losses,
    gradients_of,
    graph_ends,
    is_one,
    sum_of_prefixes,
    wants_of,
)
from fastsim.engine.one_call import in_one_call, is_whole
from fastsim.engine.sweep import asked_widths
from fastsim.operators import differentiable_again
from fastsim.scores import compute_dtype
from fastsim.tile import Tile

_NOTHING = (False,) * 4  # of what a gradient may be wanted


class WholeLoss(NamedTuple):
    """A loss that one call of the backend makes of two sides of rows; y None: of x with itself."""

    tile: Tile
    scale: float | Tensor
    bias: float | Tensor
    weights: float | Tensor | None
    formula: Callable
    backend: Backend
    measured: bool  # whether `fastsim.metrics` sees the scores
    prefixes: tuple | None = None  # (widths, factors): their sum, as `Backend.whole` takes it

    def serves(self, x, y):
        """Whether that is how rows of these sizes are served."""
        observed = self.measured and watched()
        return is_whole(self.tile, x, y, self.weights, self.backend, observed=observed)

    def __call__(self, x, y):
        y = None if y is x else y
        if self.prefixes is not None:
            asked_widths().served = True
        if not self.measured or not watched():
            return self._of(x, y, None)
        totals = no_totals(x.device)
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
            return in_one_call(tile, *given, _NOTHING, backend, totals, prefixes)[0]
        wants = wants_of(x, y, scale, bias)
        if not any(wants):
            return in_one_call(tile, *given, _NOTHING, backend, totals, prefixes)[0]
        return _WholeLoss.apply(*given, tile, wants, formula, backend, totals, prefixes)


def _formula(ctx, saved, *sides):
    """The loss in plain torch; sides and weights may be numbers. With prefixes, their sum."""
    *numbers, weight = ctx.numbers
    x, y, *scalars = (n if t is None else t for t, n in zip(sides, numbers, strict=True))
    weights = saved[4] if weight is None else weight

    def loss(x, y):
        return (dense_losses(ctx, x, y, *scalars) * weights).sum()

    return loss(x, y) if ctx.prefixes is None else sum_of_prefixes(loss, x, y, *ctx.prefixes)


class _WholeLoss(torch.autograd.Function):
    """A `WholeLoss` with what follows from it."""

    @staticmethod
    def forward(ctx, x, y, scale, bias, weights, tile, wants, formula, backend, totals, prefixes):
        given = x, y, scale, bias, weights
        loss, *found = in_one_call(tile, *given, wants, backend, totals, prefixes)
        tensors = [value if isinstance(value, Tensor) else None for value in given]
        ctx.numbers = [
            value if tensor is None else None for value, tensor in zip(given, tensors, strict=True)
        ]
        ctx.dtypes, ctx.wants = (x.dtype, loss.dtype), wants
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
        parts = ctx.backend.whole_gradients(
            ctx.tile, grad, found, given, ctx.wants, ctx.dtypes[0], spent=spent
        )
        return gradients_of(ctx, parts, 11)

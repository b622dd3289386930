"""A tile loss as one differentiable operation (the terms: fastsim/README.md, "The engine").

What the forward pass returns beside the loss depends on what is asked for, never on sizes. So
torch.compile and torch.export know the shapes where sizes are symbols.

It is the gradients where the weights of the losses are known (reduction "mean" or "sum") and all
scores are this process's own: the forward pass finds the gradients of the inputs too, and the
backward pass multiplies them by the gradient from above.

It is a state otherwise: the forward pass keeps a few numbers of each row, column or matrix, and the
backward pass computes the scores again.
"""

from dataclasses import replace
from functools import partial

import torch

from fastsim.batch_metrics import (
    not_compiled,
    nothing_seen,
    record,
    watched,
)
from fastsim.engine.arguments import SCHEMA, TENSORS, TileArguments, tile_arguments
from fastsim.engine.call import Call
from fastsim.engine.gradients import (
    as_operands,
    dense_losses,
    fake_gradients,
    found_times,
    gradients_of,
    once_each,
    wants_of,
)
from fastsim.engine.passes import backward, forward
from fastsim.engine.prepared import note
from fastsim.engine.ring import ring_tile_loss
from fastsim.engine.sweep import asked_widths, serves, summable, sweep_loss
from fastsim.engine.whole_loss import WholeLoss
from fastsim.operators import define, differentiable_again, traced
from fastsim.precision import wide_dtype
from fastsim.scores import compute_dtype


def tile_loss(
    tile,
    x,
    y,
    *,
    scale,
    bias=0.0,
    weights=None,
    batch=None,
    formula,
    backend,
    measured=True,
    summed=False,
):
    """The loss `tile` over the scores of x (N, D) and y (M, D); y=None: x with itself.

    scale and bias are numbers or 0-d tensors; `weights` (N,) asks for sum_i weights_i loss_i,
    None for the losses (N,) themselves. batch: the `Batch` of which x and y are this process's
    part; the tile's pairs are then those of x with the columns of all processes. None: x and y are
    the whole batch.
    formula: (scores (N, M), scale, bias) -> losses (N,) in plain torch, for derivatives of the
    gradient.
    measured: whether `fastsim.metrics` sees the scores.
    summed: whether the caller returns this result unchanged. Only then may the result be a sum over
        prefixes of x and y, where one is asked for (`fastsim.engine.sweep`).
    Returns the loss in the compute type, float64 for float64 inputs and else float32; log-sum-exps,
    which are merged with others, in float64.
    """
    y = None if y is x else y
    asked, alone = asked_widths() if summed else None, batch is None or batch.group is None
    if asked is not None and alone and _in_one_sweep(tile, x, y, weights, backend):
        return sweep_loss(asked, tile, x, y, scale, bias, weights, formula, backend)
    measured = measured and not tile.pairs.untargeted
    prefixes = None
    if asked is not None and _sums_in_one_call(tile, x, y, weights, backend):
        prefixes = asked.widths, asked.weights
    whole = WholeLoss(tile, scale, bias, weights, formula, backend, measured, prefixes)
    if alone and whole.serves(x, y):
        loss = whole(x, y)
        note((x, x if y is None else y), whole, loss)
        return loss
    run = partial(
        _loss,
        x=x,
        y=y,
        scale=scale,
        bias=bias,
        weights=weights,
        batch=batch,
        formula=formula,
        backend=backend,
    )
    return _watched(run, tile, x, y, batch, backend) if measured and watched() else run(tile)


def _watched(run, tile, x, y, batch, backend):
    """run(tile), whose scores `fastsim.metrics` sees."""
    not_compiled()
    seen = nothing_seen(x.shape[0], x.device)
    loss = run(replace(tile, seen=seen))
    record(seen, x, y, cosine=tile.cosine, batch=batch, backend=backend)
    return loss


def _in_one_sweep(tile, x, y, weights, backend):
    """Whether a sweep over prefixes serves a loss of one process, and pays."""
    if watched() or not serves(tile, x, weights, backend):
        return False
    return traced() or backend.sweep_pays(len(x), len(x if y is None else y))


def _sums_in_one_call(tile, x, y, weights, backend):
    """Whether the one call that makes a loss sums it over prefixes."""
    if watched() or not summable(tile, weights):
        return False
    columns = len(x if y is None else y)
    return backend.sums_prefixes(tile, len(x), columns, x.shape[1], x.dtype)


def _loss(tile, x, y, scale, bias, weights, batch, formula, backend):
    alone = batch is None or batch.group is None
    scale, bias, weights = as_operands(x, scale, bias, weights)
    if not alone:
        y = x if y is None else y
        tile = tile if tile.rows_alone else replace(tile, group=batch.name)
        if batch.ring:
            return ring_tile_loss(tile, x, y, scale, bias, weights, batch, backend)
        y = batch.gather_columns(y)
        if not len(x) and tile.rows_alone and weights is not None:
            # This rank has no row: it adds nothing, and its columns get their share all the same.
            dtype = compute_dtype(x)
            return 0.0 * (x.sum(dtype=dtype) + y.sum(dtype=dtype) + scale + bias).to(dtype)
        y = None if y is x else y
    sides = (x, y, scale, bias)
    wants = wants_of(*sides)
    learnt = zip(("scale", "bias"), wants[2:], strict=True)
    assert all(name in tile.record.learns for name, want in learnt if want), tile.kind
    arguments = once_each(tile_arguments(tile, *sides, weights, wants, backend))
    if not any(wants):
        loss, *seen = _tile(*arguments)
    else:
        # Where there is a group the formula has no scores of its own.
        without = torch.compiler.is_compiling() or not alone
        loss, *seen = _TileLoss.apply(*arguments, None if without else formula)
    if seen:
        tile.seen.copy_(seen[0])
    return loss


# ---- the registered operators ----


def _forward_fake(*arguments):
    arguments = TileArguments(*arguments)
    call = Call(arguments, fake=True)
    rows, columns = call.x.shape[0], call.y.shape[0]
    dtype = compute_dtype(call.x)
    shape = call.tile.loss_shape(rows, columns) if call.weights is None else ()
    loss = call.x.new_empty(shape, dtype=call.tile.loss_dtype(call.x))
    seen = [nothing_seen(rows, loss.device)] if arguments.observed else []
    if not any(call.wants):
        return [loss, *seen]
    if arguments.finds_gradients():
        return [loss, *fake_gradients(call, dtype), *seen]
    shapes = call.tile.state_shapes(rows, columns)
    dtype = wide_dtype(loss.device)
    return [loss, *(loss.new_empty(shape, dtype=dtype) for shape in shapes), *seen]


def _backward_fake(grad, state, *arguments):
    call = Call(TileArguments(*arguments), fake=True)
    return fake_gradients(call, call.x.dtype)


_tile = define("tile", f"({SCHEMA}) -> Tensor[]", forward, _forward_fake)
_tile_backward = define(
    "tile_backward",
    f"(Tensor grad, Tensor[] saved, {SCHEMA}) -> Tensor[]",
    backward,
    _backward_fake,
)


def _formula(ctx, saved, x, y, scale, bias):
    """The loss in plain torch; y=None: of x with itself."""
    losses, weights = dense_losses(ctx, x, y, scale, bias), saved[4]
    return losses if weights is None else (losses * weights).sum()


class _TileLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *arguments, ctx.formula = arguments
        loss, *saved = _tile(*arguments)
        arguments = TileArguments(*arguments)
        seen = [saved.pop()] if arguments.observed else []
        ctx.mark_non_differentiable(*seen)
        ctx.options, ctx.wants, ctx.cosine = arguments.options(), arguments.wants, arguments.cosine
        ctx.dtypes = arguments.x.dtype, arguments.scale.dtype
        ctx.found = arguments.finds_gradients()
        # The inputs are saved even where the gradients are found: for second derivatives, and so
        # that changing an input before the backward pass is an error in either case.
        ctx.save_for_backward(*arguments.tensors(), *saved)
        return loss, *seen

    @staticmethod
    @differentiable_again(_formula, inputs=4)
    def backward(ctx, saved, grad, *_):
        tensors, found = saved[:TENSORS], saved[TENSORS:]
        if ctx.found:
            parts = found_times(found, grad, ctx.wants)
        else:
            parts = _tile_backward(grad, found, *tensors, *ctx.options)
        return gradients_of(ctx, parts, len(TileArguments._fields) + 1)

"""A tile loss as one differentiable operation (the terms: fastsim/README.md, "The engine").

Besides the loss the forward pass returns one of two things:

* The gradients of the inputs, if the weights of the losses are known (reduction "mean" or "sum")
  and all scores belong to this process. The backward pass multiplies them by the incoming gradient.
* A state otherwise: a few numbers for each row, each column or the matrix. The backward pass
  computes the scores again.

Which one does not depend on sizes, so torch.compile and torch.export know the shapes where sizes
are symbols.
"""

from dataclasses import replace
from functools import partial

import torch

from fastsim.backends.rows import parts_needed
from fastsim.batch_metrics import (
    empty_row_metrics,
    in_metrics,
    not_compiled,
    record,
)
from fastsim.engine.arguments import SCHEMA, TENSORS, TileArguments, tile_arguments
from fastsim.engine.call import Call
from fastsim.engine.gradients import (
    as_operands,
    dense_losses,
    fake_gradients,
    gradients_of,
    needs_grad_of,
    once_each,
    times_loss_gradient,
)
from fastsim.engine.later_calls import NOTHING
from fastsim.engine.one_call_loss import OneCallLoss
from fastsim.engine.passes import backward, forward
from fastsim.engine.prepared import note
from fastsim.engine.ring import ring_tile_loss
from fastsim.engine.sweep import asked_widths, serves, summable, sweep_loss
from fastsim.operators import define, differentiable_again, traced
from fastsim.precision import compute_dtype, wide_dtype


def tile_loss(
    tile,
    x,
    y,
    *,
    scale,
    bias=0.0,
    given=NOTHING,
    weights=None,
    batch=None,
    formula,
    backend,
    for_metrics=True,
    summed=False,
):
    """The loss `tile` over the scores of x (N, D) and y (M, D), or None to compare x with itself.

    scale, bias: numbers or 0-d tensors.
    given: the `Given` of the caller's tensors beside x and y, for later calls.
    weights: (N,) asks for sum_i weights_i loss_i; None asks for the losses (N,).
    batch: the `Batch` over several processes of which x and y are this process's part; the pairs of
        the tile are then those of x with the columns of all processes. None: one process.
    formula: (scores (N, M), scale, bias) -> losses (N,) in plain torch, for second derivatives.
    for_metrics: whether `fastsim.metrics` counts these scores.
    summed: whether the caller returns this result unchanged. Only then may it be a sum over
        prefixes of x and y, if one is asked for (`fastsim.engine.sweep`).
    Returns the loss in the compute type: float64 for float64 inputs, otherwise float32.
    Log-sum-exps, which the caller merges further, are float64.
    """
    y = None if y is x else y
    asked, alone = asked_widths() if summed else None, batch is None or batch.group is None
    if asked is not None and alone and _in_one_sweep(tile, x, y, weights, backend):
        return sweep_loss(asked, tile, x, y, scale, bias, weights, formula, backend)
    for_metrics = for_metrics and not tile.pairs.untargeted
    prefixes = None
    if asked is not None and _sums_in_one_call(tile, x, y, weights, backend):
        prefixes = asked.widths, asked.weights
    one_call = OneCallLoss(tile, scale, bias, weights, formula, backend, for_metrics, prefixes)
    if alone and one_call.serves(x, y):
        loss = one_call(x, y)
        note((x, x if y is None else y, *given.tensors), one_call.kept(given), loss)
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
    if for_metrics and in_metrics():
        return _with_metrics(run, tile, x, y, batch, backend)
    return run(tile)


def _with_metrics(run, tile, x, y, batch, backend):
    """run(tile), with its scores counted in `fastsim.metrics`."""
    not_compiled()
    row_metrics = empty_row_metrics(x.shape[0], x.device)
    loss = run(replace(tile, row_metrics=row_metrics))
    record(row_metrics, x, y, cosine=tile.cosine, batch=batch, backend=backend)
    return loss


def _in_one_sweep(tile, x, y, weights, backend):
    """Whether a sweep over prefixes can compute a loss of one process, and is faster."""
    if in_metrics() or not serves(tile, x, weights, backend):
        return False
    return traced() or backend.sweep_pays(len(x), len(x if y is None else y))


def _sums_in_one_call(tile, x, y, weights, backend):
    """Whether `Backend.in_one_call` can sum this loss over prefixes."""
    if in_metrics() or not summable(tile, weights):
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
            # This rank has no rows and adds nothing, but its columns need their gradients.
            dtype = compute_dtype(x)
            return 0.0 * (x.sum(dtype=dtype) + y.sum(dtype=dtype) + scale + bias).to(dtype)
        y = None if y is x else y
    sides = (x, y, scale, bias)
    needs_grad = needs_grad_of(*sides)
    learnt = zip(("scale", "bias"), needs_grad[2:], strict=True)
    assert all(name in tile.record.learns for name, want in learnt if want), tile.kind
    arguments = once_each(tile_arguments(tile, *sides, weights, needs_grad, backend))
    if not any(needs_grad):
        loss, *row_metrics = _tile(*arguments)
    else:
        # The formula covers one process only.
        without = torch.compiler.is_compiling() or not alone
        loss, *row_metrics = _TileLossFunction.apply(*arguments, None if without else formula)
    if row_metrics:
        tile.row_metrics.copy_(row_metrics[0])
    return loss


# ---- the registered operators ----


def _forward_fake(*arguments):
    arguments = TileArguments(*arguments)
    call = Call(arguments, fake=True)
    rows, columns = call.x.shape[0], call.y.shape[0]
    dtype = compute_dtype(call.x)
    shape = call.tile.loss_shape(rows, columns) if call.weights is None else ()
    loss = call.x.new_empty(shape, dtype=call.tile.loss_dtype(call.x))
    row_metrics = [empty_row_metrics(rows, loss.device)] if arguments.with_metrics else []
    if not any(call.needs_grad):
        return [loss, *row_metrics]
    if arguments.finds_gradients():
        return [loss, *fake_gradients(call, dtype), *row_metrics]
    shapes = call.tile.state_shapes(rows, columns)
    dtype = wide_dtype(loss.device)
    return [loss, *(loss.new_empty(shape, dtype=dtype) for shape in shapes), *row_metrics]


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
    """The loss in plain torch; y=None compares x with itself."""
    losses, weights = dense_losses(ctx, x, y, scale, bias), saved[4]
    return losses if weights is None else (losses * weights).sum()


class _TileLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *arguments, ctx.formula = arguments
        loss, *saved = _tile(*arguments)
        arguments = TileArguments(*arguments)
        row_metrics = [saved.pop()] if arguments.with_metrics else []
        ctx.mark_non_differentiable(*row_metrics)
        ctx.options, ctx.needs_grad, ctx.cosine = (
            arguments.options(),
            arguments.needs_grad,
            arguments.cosine,
        )
        ctx.dtypes = arguments.x.dtype, arguments.scale.dtype
        ctx.saves_gradients = arguments.finds_gradients()
        # The inputs are saved even if the gradients are known: second derivatives need them, and
        # torch then reports an input that was changed before the backward pass.
        ctx.save_for_backward(*arguments.tensors(), *saved)
        return loss, *row_metrics

    @staticmethod
    @differentiable_again(_formula, inputs=4)
    def backward(ctx, saved, grad, *_):
        tensors, results = saved[:TENSORS], saved[TENSORS:]  # results: gradients or a state
        if ctx.saves_gradients:
            parts = times_loss_gradient(results, grad, parts_needed(ctx.needs_grad))
        else:
            parts = _tile_backward(grad, results, *tensors, *ctx.options)
        return gradients_of(ctx, parts, len(TileArguments._fields) + 1)

"""A tile loss summed over prefixes of the embeddings, in one sweep over their numbers.

    L = sum_k c_k loss(x[:, :w_k], y[:, :w_k]),   w_1 < w_2 < ... < w_K

x_k and y_k are the unit rows of the prefixes, n_k their norms, and S_k the cosines of prefix k. A
longer prefix has all products of a shorter one, and those of its own columns w_{k-1} to w_k:

    S_k = r_k S_{k-1} q_k^T + x_k[own] y_k[own]^T,   r_k = |x_{k-1}| / |x_k| of each row, q_k of y

So the products of all widths cost what those of the last one cost. The gradient goes back the same
way. With G_k = dL_k/dS_k of the width's own loss, what S_k does to the whole sum is

    H_k = G_k + r_{k+1} H_{k+1} q_{k+1}^T

and the own columns of prefix k get one product, H_k y_k[own]. What is left are the norms: of each
row the number a_k = sum_j G_k S_k, along which the gradient of S_k has no part. With it

    dx[own] = (H_k y_k[own] - s_k x[own]) / n_k,   s_k = a_k / n_k + r_{k+1} s_{k+1}

It comes from the products themselves, so that what they are rounded by has no part along x either:
a prefix of one number has gradient 0, however small the number. Prefixes l <= k have in the columns
up to w_k what all have there, but what the longer ones give S_k, which the epilogue adds up beside
the score gradients:

    sum_{l <= k} a_l = sum_{l <= k} x[own_l] . (H_l y_l[own_l]) / n_l - d_k
    d_k = sum_j (r_{k+1} H_{k+1} q_{k+1}^T) S_k

No power of a norm is formed but the first, so that prefixes may be as short as any row. Where a
prefix is zero, its cosines are 0 and have no gradient, but it has its part in the longer ones': it
is held in units of the next longer norm.

Where the scores are products of the rows as they are, r, q and n are 1 and s is 0. A *width* is the
step that adds the products of a prefix's own columns. Two ways through it, as in
fastsim/engine/passes.py: fused, where a block of whole rows has what its score gradients need, or
first the states and then the score gradients. There is a panel of each width.
"""

import contextlib
import threading
from dataclasses import dataclass

import torch

from fastsim.autocast import without_autocast
from fastsim.engine.arguments import SCHEMA, TENSORS, TileArguments, tile_arguments
from fastsim.engine.call import Call, Products
from fastsim.engine.gradients import (
    as_operands,
    dense_losses,
    fake_gradients,
    found_times,
    gradients_of,
    once_each,
    sum_of_prefixes,
    wants_of,
)
from fastsim.engine.passes import at_once
from fastsim.engine.prefixes import Prefixes
from fastsim.operators import define, differentiable_again
from fastsim.precision import wide_dtype, widened
from fastsim.scores import compute_dtype

# ---- what is asked for ----


@dataclass
class AskedWidths:
    """Ascending widths and as many weights c_k; served: whether a loss has been their sum."""

    widths: tuple
    weights: tuple
    served: bool = False


class _OfThread(threading.local):  # torch.compile cannot trace a ContextVar
    now: AskedWidths | None = None


_of_thread = _OfThread()


@contextlib.contextmanager
def sum_over(widths, weights):
    """Within the block, a loss that can be is the sum over prefixes; see `AskedWidths.served`.

    The embeddings given to it are as wide as the widest.
    """
    before = asked_widths()
    widths, weights = zip(*sorted(zip(widths, weights, strict=True)), strict=True)
    asked = AskedWidths(widths, tuple(map(float, weights)))
    _of_thread.now = asked
    try:
        yield asked
    finally:
        _of_thread.now = before


def asked_widths():
    """The `AskedWidths` of this thread, or None."""
    return _of_thread.now


def summable(tile, weights):
    """Whether the sum over prefixes of a loss is a sum over scores of the same pairs."""
    return weights is not None and tile.pairs.plain


def serves(tile, x, weights, backend):
    """Whether a sweep serves a loss of one process, whatever its sizes."""
    known = summable(tile, weights) and not tile.pairs.each_once
    # Norms of prefixes and sums of score gradients are kept in float64.
    wide = wide_dtype(x.device) == torch.float64
    return known and wide and backend.sweeps(tile, x.dtype, x.device)


def sweep_loss(asked, tile, x, y, scale, bias, weights, formula, backend):
    """The sum over the widths of `fastsim.engine.autograd.tile_loss` with these arguments."""
    asked.served = True
    y = None if y is x else y
    scale, bias, weights = as_operands(x, scale, bias, weights)
    sides = (x, y, scale, bias)
    wants = wants_of(*sides)
    arguments = once_each(tile_arguments(tile, *sides, weights, wants, backend))
    if not any(wants):
        return _sweep(*arguments, asked.widths, asked.weights)[0]
    formula = None if torch.compiler.is_compiling() else formula
    return _SweepLoss.apply(*arguments, asked.widths, asked.weights, formula)


# ---- one call ----


def forward(*arguments):
    """[loss, if a gradient is wanted those of the inputs] of the weighted sum over the widths."""
    *arguments, widths, width_weights = arguments
    call = Call(TileArguments(*arguments))
    call.weigh_rows()
    with without_autocast(call.x.device.type):
        x = Prefixes.of(call.x, widths, call.tile.cosine, call.backend)
        y = x if call.together else Prefixes.of(call.y, widths, call.tile.cosine, call.backend)
        fused = any(call.wants) and at_once(call)
        keep = any(call.wants) and not fused
        panels = call.backend.sweep(call.tile, x, y, whole_rows=fused, keep=keep)
        of_width = [weight * call.weights for weight in width_weights]
        found = []
        if any(call.wants):
            states, products = (_fused if fused else _in_two_passes)(call, panels, x, y, of_width)
            of_rows = [list(each.result()) for each in products]
            dots = panels.row_dots, panels.column_dots
            del products, panels  # before the results are made of their gradients
            x.rows, y.rows = [], []
            found = _input_gradients(call, dots, states, of_rows, (x, y), widths, of_width)
        else:
            states = panels.forward()
        losses = [
            (call.tile.finish(state) * widened(weights)).sum()
            for state, weights in zip(states, of_width, strict=True)
        ]
        return [torch.stack(losses).sum().to(call.tile.loss_dtype(call.x)), *found]


def _fused(call, panels, x, y, weights):
    products = _products(call, x, y, spent=True)
    weights, found = torch.stack(weights), []
    for block in panels.blocks():
        found.append(panels.fused_pass(block, weights, products))
    of_widths = zip(*found, strict=True)
    return [list(map(torch.cat, zip(*parts, strict=True))) for parts in of_widths], products


def _in_two_passes(call, panels, x, y, weights):
    states = panels.forward()
    coefficients = panels.coefficients(states, weights)
    products = _products(call, x, y, spent=False)
    for block in panels.blocks():
        panels.score_grad(block, coefficients, products)
    return states, products


def _products(call, x, y, *, spent):
    dtype = compute_dtype(call.x)
    sides = zip(x.rows, y.rows, strict=True)
    return [Products(call, *rows, dtype, spent=spent) for rows in sides]


def _input_gradients(call, dots, states, of_rows, prefixes, widths, weights):
    """dL/dx and dL/dy in the compute type, empty where not wanted, dL/dscale and dL/dbias (2,).

    of_rows: of each width those of the prefixes' own columns, which are let go.
    """
    row_dots, column_dots = dots
    if call.together:
        dots = row_dots + column_dots, None
    grads, along = [], None  # of rows, by row: their products with their gradients
    for place, values in enumerate((call.x, call.y)):
        found = [both.pop(0) for both in of_rows]
        wanted = any(grad.numel() for grad in found)
        grad = values.new_empty(values.shape if wanted else 0, dtype=compute_dtype(values))
        if wanted:
            side, of_side = prefixes[place], dots[place]
            along = side.backward(found, values, of_side, grad, widths, call.backend)
        del found
        # Rows whose gradient is not wanted may be here for the gradient of the scale alone.
        grads.append(grad if call.wants[place] else grad.new_empty(0))
    parameters = call.x.new_zeros(2, dtype=torch.float64)
    record = call.tile.record
    doubled = [widened(of_width) for of_width in weights]
    if call.wants[2]:
        # Together, the products hold the rows' and the columns' share of the same sum.
        parameters[0] = along.sum() / ((1 + call.together) * call.scale)
        for state, of_width in zip(states, doubled, strict=True):
            parameters[0] += record.scale_gradient(call.tile, state, of_width)
    if call.wants[3]:
        for state, of_width in zip(states, doubled, strict=True):
            parameters[1] += record.bias_gradient(call.tile, state, of_width)
    return *grads, parameters


# ---- the registered operator ----


def _forward_fake(*arguments):
    *arguments, _, _ = arguments
    call = Call(TileArguments(*arguments), fake=True)
    loss = call.x.new_empty((), dtype=call.tile.loss_dtype(call.x))
    return [loss, *(fake_gradients(call, compute_dtype(call.x)) if any(call.wants) else ())]


_sweep = define(
    "sweep",
    f"({SCHEMA}, int[] widths, float[] width_weights) -> Tensor[]",
    forward,
    _forward_fake,
)


def _formula(ctx, saved, x, y, scale, bias):
    """The loss in plain torch; y=None: of x with itself."""
    weights = saved[4]

    def loss(x, y):
        return (dense_losses(ctx, x, y, scale, bias) * weights).sum()

    return sum_of_prefixes(loss, x, y, ctx.widths, ctx.width_weights)


class _SweepLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        *arguments, widths, width_weights, ctx.formula = arguments
        loss, *found = _sweep(*arguments, widths, width_weights)
        ctx.widths, ctx.width_weights = widths, width_weights
        arguments = TileArguments(*arguments)
        ctx.wants, ctx.cosine = arguments.wants, arguments.cosine
        ctx.dtypes = arguments.x.dtype, arguments.scale.dtype
        ctx.save_for_backward(*arguments.tensors(), *found)
        return loss

    @staticmethod
    @differentiable_again(_formula, inputs=4)
    def backward(ctx, saved, grad):
        parts = found_times(saved[TENSORS:], grad, ctx.wants)
        return gradients_of(ctx, parts, len(TileArguments._fields) + 3)

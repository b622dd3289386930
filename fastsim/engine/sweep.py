"""A tile loss summed over prefixes of the embeddings, in one sweep over their numbers.

    L = sum_k c_k loss(x[:, :w_k], y[:, :w_k]),   w_1 < w_2 < ... < w_K

x_k and y_k are the unit rows of prefix k, n_k their norms, and S_k their cosines. The *own* columns
of prefix k are w_{k-1} to w_k, those that prefix k - 1 lacks. A prefix has the products of the next
shorter one and those of its own columns:

    S_k = r_k S_{k-1} q_k^T + x_k[own] y_k[own]^T,   r_k = |x_{k-1}| / |x_k| of each row, q_k of y

So the products of all widths together cost as much as those of the last width. The gradient goes
back the same way. With G_k = dL_k/dS_k, where L_k is the loss of width k, the gradient of the whole
sum with respect to S_k is

    H_k = G_k + r_{k+1} H_{k+1} q_{k+1}^T

and the own columns of prefix k need one product, H_k y_k[own]. The gradient of a cosine with
respect to x is orthogonal to x; a_k = sum_j G_k S_k of each row is the part along x to subtract:

    dx[own] = (H_k y_k[own] - s_k x[own]) / n_k,   s_k = a_k / n_k + r_{k+1} s_{k+1}

a_k is computed from the products themselves, so that their rounding errors cancel too: a prefix of
one number has gradient 0, however small the number is. The sums of a_l follow from the products of
the own columns, minus d_k, the part that the longer prefixes add to the gradient of S_k; the
epilogue sums d_k up beside the score gradients:

    sum_{l <= k} a_l = sum_{l <= k} x[own_l] . (H_l y_l[own_l]) / n_l - d_k
    d_k = sum_j (r_{k+1} H_{k+1} q_{k+1}^T) S_k

Norms occur in no higher power than the first, so a prefix may be as short as any row. If a prefix
is zero, its cosines are 0 and have no gradient, but it is still part of the longer ones: it is
stored in units of the next longer norm.

For dot products r, q and n are 1 and s is 0. Each width has its panel. As in
fastsim/engine/passes.py there are two ways: fused, if a block of whole rows contains all that its
score gradients depend on; otherwise first the states, then the score gradients.
"""

import contextlib
import threading
from dataclasses import dataclass

import torch

from fastsim.autocast import without_autocast
from fastsim.backends.rows import parts_needed
from fastsim.engine.arguments import SCHEMA, TENSORS, TileArguments, tile_arguments
from fastsim.engine.call import Call, Products
from fastsim.engine.gradients import (
    as_operands,
    dense_losses,
    fake_gradients,
    gradients_of,
    needs_grad_of,
    once_each,
    sum_of_prefixes,
    times_loss_gradient,
)
from fastsim.engine.passes import at_once
from fastsim.engine.prefixes import Prefixes
from fastsim.operators import define, differentiable_again
from fastsim.precision import compute_dtype, wide_dtype, widened

# ---- the request ----


@dataclass
class AskedWidths:
    """Ascending widths w_k and their weights c_k; served: whether a loss has computed the sum."""

    widths: tuple
    weights: tuple
    served: bool = False


class _OfThread(threading.local):  # torch.compile cannot trace a ContextVar
    now: AskedWidths | None = None


_of_thread = _OfThread()


@contextlib.contextmanager
def sum_over(widths, weights):
    """Within the block a loss returns its sum over prefixes, if it can; see `AskedWidths.served`.

    Its embeddings have to be as wide as the largest width.
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
    """Whether the losses of all prefixes are over the same pairs, so that they can be summed."""
    return weights is not None and tile.pairs.plain


def serves(tile, x, weights, backend):
    """Whether a sweep can compute a loss of one process, of any size."""
    known = summable(tile, weights) and not tile.pairs.each_once
    # Norms of prefixes and sums of score gradients need float64.
    wide = wide_dtype(x.device) == torch.float64
    return known and wide and backend.sweeps(tile, x.dtype, x.device)


def sweep_loss(asked, tile, x, y, scale, bias, weights, formula, backend):
    """The sum over the widths of `fastsim.engine.autograd.tile_loss` with these arguments."""
    asked.served = True
    y = None if y is x else y
    scale, bias, weights = as_operands(x, scale, bias, weights)
    sides = (x, y, scale, bias)
    needs_grad = needs_grad_of(*sides)
    arguments = once_each(tile_arguments(tile, *sides, weights, needs_grad, backend))
    if not any(needs_grad):
        return _sweep(*arguments, asked.widths, asked.weights)[0]
    formula = None if torch.compiler.is_compiling() else formula
    return _SweepLoss.apply(*arguments, asked.widths, asked.weights, formula)


# ---- one call ----


def forward(*arguments):
    """[loss, *gradients of the inputs] of the weighted sum over the widths."""
    *arguments, widths, width_weights = arguments
    call = Call(TileArguments(*arguments))
    call.weigh_rows()
    with without_autocast(call.x.device.type):
        x = Prefixes.of(call.x, widths, call.tile.cosine, call.backend)
        y = x
        if not call.self_similarity:
            y = Prefixes.of(call.y, widths, call.tile.cosine, call.backend)
        fused = any(call.needs_grad) and at_once(call)
        keep = any(call.needs_grad) and not fused
        panels = call.backend.sweep(call.tile, x, y, whole_rows=fused, keep=keep)
        of_width = [weight * call.weights for weight in width_weights]
        found = []
        if any(call.needs_grad):
            states, products = (_fused if fused else _in_two_passes)(call, panels, x, y, of_width)
            results = [list(each.result()) for each in products]
            dots = panels.row_dots, panels.column_dots
            del products, panels  # before `_input_gradients` allocates its results
            x.rows, y.rows = [], []
            found = _input_gradients(call, dots, states, results, (x, y), widths, of_width)
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


def _input_gradients(call, dots, states, products, prefixes, widths, weights):
    """(dL/dx, dL/dy, dL/d(scale, bias) (2,)), the first two in the compute type, empty if not
    needed.

    dots: d_k of the rows and of the columns, (K - 1, N) and (K - 1, M).
    products: for each width the products for the own columns of [x, y]; each is freed after use.
    prefixes: the `Prefixes` of x and y.
    weights: for each width the weights of the losses, (N,).
    """
    row_dots, column_dots = dots
    if call.self_similarity:
        dots = row_dots + column_dots, None
    grads, sums = [], None  # sums: sum_k a_k of each row of one side
    for place, values in enumerate((call.x, call.y)):
        own_products = [both.pop(0) for both in products]
        wanted = any(product.numel() for product in own_products)
        grad = values.new_empty(values.shape if wanted else 0, dtype=compute_dtype(values))
        if wanted:
            side, side_dots = prefixes[place], dots[place]
            sums = side.backward(own_products, values, side_dots, grad, widths, call.backend)
        del own_products
        # A side that needs no gradient may be here for the gradient of the scale alone.
        grads.append(grad if call.needs_grad[place] else grad.new_empty(0))
    parameters = call.x.new_zeros(2, dtype=torch.float64)
    record = call.tile.record
    wide_weights = [widened(of_width) for of_width in weights]
    if call.needs_grad[2]:
        # If x is compared with itself, `sums` has the sum of the rows and that of the columns.
        parameters[0] = sums.sum() / ((1 + call.self_similarity) * call.scale)
        for state, of_width in zip(states, wide_weights, strict=True):
            parameters[0] += record.scale_gradient(call.tile, state, of_width)
    if call.needs_grad[3]:
        for state, of_width in zip(states, wide_weights, strict=True):
            parameters[1] += record.bias_gradient(call.tile, state, of_width)
    return *grads, parameters


# ---- the registered operator ----


def _forward_fake(*arguments):
    *arguments, _, _ = arguments
    call = Call(TileArguments(*arguments), fake=True)
    loss = call.x.new_empty((), dtype=call.tile.loss_dtype(call.x))
    return [loss, *(fake_gradients(call, compute_dtype(call.x)) if any(call.needs_grad) else ())]


_sweep = define(
    "sweep",
    f"({SCHEMA}, int[] widths, float[] width_weights) -> Tensor[]",
    forward,
    _forward_fake,
)


def _formula(ctx, saved, x, y, scale, bias):
    """The loss in plain torch; y=None compares x with itself."""
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
        ctx.needs_grad, ctx.cosine = arguments.needs_grad, arguments.cosine
        ctx.dtypes = arguments.x.dtype, arguments.scale.dtype
        ctx.save_for_backward(*arguments.tensors(), *found)
        return loss

    @staticmethod
    @differentiable_again(_formula, inputs=4)
    def backward(ctx, saved, grad):
        needed = parts_needed(ctx.needs_grad)
        parts = times_loss_gradient(saved[TENSORS:], grad, needed)
        return gradients_of(ctx, parts, len(TileArguments._fields) + 3)

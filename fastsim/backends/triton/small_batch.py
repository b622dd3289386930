"""A small batch: a product of all scores, a kernel for losses and score gradients, two products.

Its time is calls, so what the passes over panels do between their launches is done by kernels: the
rows of both sides are made in one launch, the losses and score gradients of whole rows in another
(two where columns are looked at), and in the backward pass the gradients of both sides in a third,
which multiplies them by the gradient from above.

The score gradients are those of logits without the weight of the losses, at most 1 or 2, and so fit
float16 by a constant factor; weight and scale come in with the gradients of the rows, in float32.
"""

import functools

import torch

from fastsim.backends.half_rows import LARGEST, LARGEST_GRADIENT
from fastsim.backends.panel import panel_bytes

MOST = 1 << 26  # scores, whose products take 256 MB; more and these outweigh the calls
FEWER = 1 << 24  # the same of a loss of more work on each: by sigmoids, or by columns too
WIDEST = 1 << 13  # columns, which a program holds at a time


@functools.cache
def _launches():
    from fastsim.backends.triton.kernels import small_batch

    return small_batch


class SmallBatch:
    """The part of `TritonBackend` that serves a small batch."""

    def serves_whole(self, tile, rows, columns, width, together, dtype):
        pairs = tile.pairs
        if tile.kind not in LARGEST_GRADIENT or columns > WIDEST:
            return False
        if rows * columns > (FEWER if tile.symmetric or tile.kind == "sigmoid" else MOST):
            return False
        if 4 * rows * columns > panel_bytes(4 * MOST) or not (tile.cosine and tile.by_index):
            return False
        if tile.kind != "softmax" or pairs.one_positive:
            return pairs.distinct or not tile.symmetric
        return tile.normalise and pairs.negative_target >= 0

    def whole(self, tile, x, y, scale, bias, weights, wants, totals=None, prefixes=None):
        launches = _launches()
        operands = launches.rows_of(x, y)
        unit_x, unit_y, _ = operands
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        products = unit_x.new_empty((rows, columns), dtype=torch.float32)
        self.multiply(unit_x, unit_y.t(), products, accumulate=False)
        losses = unit_x.new_empty(rows, dtype=torch.float64)
        panel = sums = None
        if wants is not None:
            panel = _panel(unit_x, products)
            if isinstance(scale, torch.Tensor) or isinstance(bias, torch.Tensor):
                sums = losses.new_empty((2, rows))
        numbers = _number(scale), _number(bias), weights
        launches.losses(tile, operands, products, panel, (losses, sums), numbers, _gain(tile, x))
        loss = losses.sum().to(torch.float32)
        if wants is None:
            return (loss,)
        grad_x = grad_y = None
        if wants[0]:
            grad_x = products.new_empty(unit_x.shape)
            self.multiply(panel, unit_y, grad_x, accumulate=False)
        if wants[0] and y is None:
            self.multiply(panel.t(), unit_x, grad_x, accumulate=True)
        if wants[1]:
            grad_y = products.new_empty(unit_y.shape)
            self.multiply(panel.t(), unit_x, grad_y, accumulate=False)
        return loss, grad_x, grad_y, sums, *operands

    def whole_gradients(self, tile, grad, found, given, wants, dtype, *, spent=False):
        x, y, scale, _, weights = given
        grad_x, grad_y, sums, *operands = found
        launches = _launches()
        sides = (None, None)
        if wants[0] or wants[1]:
            sides = launches.rows_backward(
                grad,
                (grad_x, grad_y),
                launches.Sides(*operands),
                x,
                y,
                _number(scale),
                weights,
                _gain(tile, x),
                wants,
                dtype,
            )
        numbers = None
        if wants[2] or wants[3]:
            numbers = sums.sum(1)
            numbers = numbers if grad is None else numbers * grad
        return *sides, numbers


def _number(value):
    """A number as the kernels take it: no integer, of which each would be compiled for."""
    return value if isinstance(value, torch.Tensor) else float(value)


def _panel(unit, products):
    """(N, M) in the type of the operands: in place of the products, each row of its own.

    Else where library products would not have its rows aligned.
    """
    rows, columns = products.shape
    if unit.dtype == torch.float32:
        return products
    if columns % 4 == 0:
        return products.view(unit.dtype)[:, :columns]
    stride = -(-columns // 8) * 8
    return unit.new_empty((rows, stride))[:, :columns]


def _gain(tile, x):
    return LARGEST / LARGEST_GRADIENT[tile.kind] if x.dtype.itemsize == 2 else 1.0

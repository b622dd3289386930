"""A small batch: a product of all scores, a kernel for losses and score gradients, two products.

A small batch spends its time on calls, so kernels do what the passes over panels do between their
launches. One launch computes the unit rows of both sides. Another computes losses and score
gradients of whole rows; a loss that also depends on columns takes two launches for these. In the
backward pass one more launch computes the gradients of both sides, times dL/dloss.

The panel holds dL/dlogit without the weight of the losses. No entry is larger than 1 or 2, so a
constant factor brings the panel into the range of float16. The gradients of the rows are multiplied
by weight and scale, in float32.
"""

import functools

import torch

from fastsim.backends.half_rows import LARGEST, LARGEST_GRADIENT
from fastsim.backends.panel import panel_bytes

# The most scores. Their products take 256 MB. With more scores the products outweigh the calls.
MOST_SCORES = 1 << 26
# The most scores of losses with more work on each score: sigmoid and symmetric losses.
MOST_HEAVY_SCORES = 1 << 24
# The most columns. A program holds all columns of a row at a time.
MOST_COLUMNS = 1 << 13


@functools.cache
def _launches():
    from fastsim.backends.triton.kernels import small_batch

    return small_batch


class SmallBatch:
    """The part of `TritonBackend` that serves a small batch."""

    def serves_one_call(self, tile, rows, columns, width, self_similarity, dtype):
        pairs = tile.pairs
        if tile.kind not in LARGEST_GRADIENT or columns > MOST_COLUMNS:
            return False
        heavy = tile.symmetric or tile.kind == "sigmoid"
        if rows * columns > (MOST_HEAVY_SCORES if heavy else MOST_SCORES):
            return False
        if 4 * rows * columns > panel_bytes(4 * MOST_SCORES) or not (tile.cosine and tile.by_index):
            return False
        if tile.kind != "softmax" or pairs.one_positive:
            return pairs.distinct or not tile.symmetric
        return tile.normalise and pairs.negative_target >= 0

    def in_one_call(self, tile, x, y, scale, bias, weights, needs_grad, totals=None, prefixes=None):
        launches = _launches()
        operands = launches.unit_sides(x, y)
        unit_x, unit_y, _ = operands
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        products = unit_x.new_empty((rows, columns), dtype=torch.float32)
        self.multiply(unit_x, unit_y.t(), products, accumulate=False)
        losses = unit_x.new_empty(rows, dtype=torch.float64)
        panel = sums = None
        if needs_grad is not None:
            panel = _panel(unit_x, products)
            if isinstance(scale, torch.Tensor) or isinstance(bias, torch.Tensor):
                sums = losses.new_empty((2, rows))
        numbers = _number(scale), _number(bias), weights
        launches.losses(tile, operands, products, panel, (losses, sums), numbers, _gain(tile, x))
        loss = losses.sum().to(torch.float32)
        if needs_grad is None:
            return (loss,)
        grad_x = grad_y = None
        if needs_grad[0]:
            grad_x = products.new_empty(unit_x.shape)
            self.multiply(panel, unit_y, grad_x, accumulate=False)
        if needs_grad[0] and y is None:
            self.multiply(panel.t(), unit_x, grad_x, accumulate=True)
        if needs_grad[1]:
            grad_y = products.new_empty(unit_y.shape)
            self.multiply(panel.t(), unit_x, grad_y, accumulate=False)
        return loss, grad_x, grad_y, sums, *operands

    def one_call_gradients(self, tile, grad, found, given, needs_grad, dtype, *, spent=False):
        x, y, scale, _, weights = given
        grad_x, grad_y, sums, *operands = found
        launches = _launches()
        sides = (None, None)
        if needs_grad[0] or needs_grad[1]:
            sides = launches.rows_backward(
                grad,
                (grad_x, grad_y),
                launches.Sides(*operands),
                x,
                y,
                _number(scale),
                weights,
                _gain(tile, x),
                needs_grad,
                dtype,
            )
        numbers = None
        if needs_grad[2] or needs_grad[3]:
            numbers = sums.sum(1)
            numbers = numbers if grad is None else numbers * grad
        return *sides, numbers


def _number(value):
    """A number as kernels take it: a float, as a kernel would be compiled for each integer."""
    return value if isinstance(value, torch.Tensor) else float(value)


def _panel(unit, products):
    """The panel (N, M) in the type of the operands, each row in the memory of its products.

    If its rows would then not be aligned for library products, it gets new memory.
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

"""A small batch in few operations: the rows of both sides at once, and the whole matrix of scores.

A small batch spends its time on calls. Losses and score gradients are therefore computed together,
both sides share the operations on rows, and the last of these also multiplies by dL/dloss. The
arithmetic is that of the dense formulas in the compute type. If rows are multiplied in 16 bits, a
constant factor brings the score gradients, at most 1 or 2, into the range of float16.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fastsim.backends.half_rows import LARGEST, LARGEST_GRADIENT
from fastsim.backends.torch import compiled, panels
from fastsim.backends.torch.block import LEFT_OUT, Block
from fastsim.backends.torch.row_metrics import add_row_metrics
from fastsim.batch_metrics import empty_row_metrics
from fastsim.precision import compute_dtype, inverse_norms, wide_dtype
from fastsim.reduce import softplus
from fastsim.ties import highest_equal

FEW = 1 << 20  # scores of a softmax, all parts together; plain torch keeps several such matrices


class Scored(NamedTuple):
    """The losses and gradients of a block of scores, in the compute type.

    losses: terms whose sum is the loss, before its weight.
    grads: (N, M) dL/dlogit before the weight, or None.
    scores: (N, M) the scores in the logits, after the margin.
    """

    losses: Tensor
    grads: Tensor | None
    scores: Tensor


class SmallBatch:
    """The part of `TorchBackend` that serves a small batch."""

    one_call_records_metrics = True

    def serves_one_call(self, tile, rows, columns, width, self_similarity, dtype):
        pairs = tile.pairs
        if tile.kind not in _LOSSES or not tile.by_index or columns < 2:
            return False
        device = next(tensor for tensor in pairs.tensors() if tensor is not None).device
        scores = rows * columns
        if scores > min(panels.small_scores(device), panels.panel_scores(device)):
            return False
        if compiled.wanted(device, scores):
            return False
        if tile.kind == "softmax" and pairs.one_positive:
            return pairs.distinct or not tile.symmetric
        if tile.kind == "softmax":
            return tile.normalise and pairs.negative_target == 0
        return tile.kind != "sigmoid" or pairs.negative_target == -1

    def leaves_further(self, rows, columns, device):
        return device.type != "cpu" and rows * columns <= FEW

    def in_one_call(self, tile, x, y, scale, bias, weights, needs_grad, totals=None, prefixes=None):
        dtype = compute_dtype(x)
        sides, graded, *saved = (_unit_rows if tile.cosine else _plain_rows)(self, x, y)
        scores = _product(sides[0], sides[1].t(), dtype)
        place = slice(0, scores.shape[0]), slice(0, scores.shape[1])
        block = Block.of(tile.pairs, place, scores, scores.shape[1], None, None)
        row_metrics = (
            tile.row_metrics if totals is None else empty_row_metrics(x.shape[0], x.device)
        )
        if row_metrics is not None:
            add_row_metrics(block, row_metrics)
        if totals is not None:
            totals.copy_(self.batch_totals(row_metrics, *((x, y) if tile.cosine else (None, None))))
        block.leave_out()
        result = _LOSSES[tile.kind](tile, block, scale, bias, needs_grad is not None)
        loss = (result.losses.sum(dtype=wide_dtype(x.device)) * weights).to(dtype)
        if needs_grad is None:
            return (loss,)
        number_grads = None
        if isinstance(scale, Tensor) or isinstance(bias, Tensor):
            number_grads = _number_grads(result, weights)
        grads = result.grads
        if graded[0].dtype != dtype:
            grads = grads.mul_(LARGEST / LARGEST_GRADIENT[tile.kind]).to(graded[0].dtype)
        row_grads = _row_grads(grads, graded, dtype, y is None, needs_grad)
        return loss, *row_grads, number_grads, *saved

    def one_call_gradients(self, tile, grad, found, given, needs_grad, dtype, *, spent=False):
        x, _, scale, _, weights = given
        grad_x, grad_y, number_grads, *saved = found
        half = self._half(x.device, x.dtype) if tile.cosine else self.dots_of_16_bits(x)
        factor = weights / (LARGEST / LARGEST_GRADIENT[tile.kind]) if half else weights
        factor = factor * scale
        factor = factor if grad is None else grad * factor
        if needs_grad[2] or needs_grad[3]:
            number_grads = number_grads if grad is None else number_grads * grad
        row_gradients = _unit_gradients if tile.cosine else _plain_gradients
        arguments = *saved, factor, x.shape[0], needs_grad, dtype
        sides = row_gradients((grad_x, grad_y), *arguments)
        if grad is None:
            # The results of an operator may not share memory.
            sides = [side if side is None else side.clone() for side in sides]
        return *sides, number_grads


# ---- rows ----


def _unit_rows(backend, x, y):
    """(operands of scores, operands of products with score gradients, unit rows, inverse norms).

    The operands are pairs, one for each side. Unit rows (N + M, D) and inverse norms (N + M, 1) are
    in the compute type, x before y; those of x alone if y is None.
    """
    rows = x if y is None else torch.cat((x, y))
    dtype = compute_dtype(x)
    rows = rows if rows.dtype == dtype else rows.to(dtype)
    inverse = inverse_norms(rows).to(dtype)[:, None]
    unit = rows * inverse
    operands = unit.to(torch.float16) if backend._half(x.device, x.dtype) else unit
    sides = (operands,) * 2 if y is None else operands.split((x.shape[0], y.shape[0]))
    return sides, sides, unit, inverse


def _plain_rows(backend, x, y):
    """`_unit_rows` for dot products.

    It returns the sizes of x and y (`Backend.dot_rows`), None for 1, instead of unit rows and
    inverse norms.
    """
    parts = [_plain(backend, side) for side in (x, y) if side is not None]
    sides, graded, sizes = zip(*(parts * 2 if y is None else parts), strict=True)
    return sides, graded, *sizes


def _plain(backend, x):
    if not backend.dots_of_16_bits(x):
        rows = x.to(compute_dtype(x))
        return rows, rows, None
    if x.dtype == torch.float16:
        return x, x, None
    rows, size = backend.dot_rows(x)
    return rows.values, rows.graded, size


def _product(left, right, dtype):
    if left.dtype == dtype:
        return torch.mm(left, right)
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    panels.multiply(left, right, out)
    return out


def _row_grads(grads, sides, dtype, self_similarity, needs_grad):
    """The gradients of the operands: (both sides (N + M, D), None), or (x, y), None if not needed.

    If x is compared with itself, that of x is the sum of both.
    """
    if self_similarity:
        both = _product(grads, sides[1], dtype) if needs_grad[0] else None
        if needs_grad[0]:
            panels.multiply(grads.t(), sides[0], both, accumulate=True)
        return both, None
    if needs_grad[0] and needs_grad[1] and grads.dtype == dtype:
        counts = sides[0].shape[0], sides[1].shape[0]
        both = grads.new_empty((sum(counts), sides[0].shape[1]))
        grad_x, grad_y = both.split(counts)
        torch.mm(grads, sides[1], out=grad_x)
        torch.mm(grads.t(), sides[0], out=grad_y)
        return both, None
    grad_x = _product(grads, sides[1], dtype) if needs_grad[0] else None
    return grad_x, _product(grads.t(), sides[0], dtype) if needs_grad[1] else None


def _unit_gradients(unit_grads, unit, inverse, factor, rows, needs_grad, dtype):
    """(dL/dx, dL/dy) from the gradients of unit rows, None where not needed.

    dL/dx = factor r (g - (u . g) u) for u = r x and g = dL/du.
    """
    both, grad_y = unit_grads
    if both is None and grad_y is None:
        return None, None
    if both is not None and grad_y is None and both.shape == unit.shape:
        grads = _backward(both, unit, inverse, factor, dtype)
        if both.shape[0] == rows:
            return grads, None
        grad_x, grad_y = grads.split((rows, grads.shape[0] - rows))
        return grad_x if needs_grad[0] else None, grad_y if needs_grad[1] else None
    sides = zip((both, grad_y), (slice(0, rows), slice(rows, None)), strict=True)
    return tuple(
        None if grad is None else _backward(grad, unit[part], inverse[part], factor, dtype)
        for grad, part in sides
    )


def _plain_gradients(row_grads, size, other, factor, rows, needs_grad, dtype):
    """(dL/dx, dL/dy) for dot products, None where not needed.

    size, other: the sizes of x and y. `row_grads` are products with the rows of the other side, and
    so have to be multiplied by the size of that side.
    """
    grad_x, grad_y = row_grads
    if needs_grad[0] and needs_grad[1] and grad_y is None:  # float32 rows, whose sizes are 1
        grad_x, grad_y = grad_x.split((rows, grad_x.shape[0] - rows))
    factors = (factor if lacking is None else factor * lacking for lacking in (other, size))
    pairs = zip((grad_x, grad_y), factors, strict=True)
    return [None if grad is None else (grad * number).to(dtype) for grad, number in pairs]


def _backward(grad_unit, unit, inverse, factor, dtype):
    dots = (unit * grad_unit).sum(1, keepdim=True, dtype=wide_dtype(unit.device)).to(unit.dtype)
    grad = torch.addcmul(grad_unit, unit, dots, value=-1).mul_(inverse * factor)
    return grad if grad.dtype == dtype else grad.to(dtype)


# ---- losses ----


def _number_grads(result, weights):
    """(dL/dscale, dL/dbias) as (2,)."""
    wide = wide_dtype(result.grads.device)
    # Pairs that are left out have gradient 0.
    along = (result.grads * result.scores).sum(dtype=wide)
    return torch.stack((along, result.grads.sum(dtype=wide))) * weights


def _softmax(tile, block, scale, bias, gradients):
    scores, pairs = block.panel, tile.pairs
    if tile.margin:
        block.add_at_positives(scores.new_full((scores.shape[0], 1), -tile.margin))
    logits = scores * scale
    shares = log_softmax(logits, 1)
    if not pairs.one_positive:
        return _group_softmax(block, shares, gradients)
    index = pairs.positives[:, None]
    losses = shares.gather(1, index)
    across = None
    if tile.symmetric:
        across, column_logs = _column_softmax(logits, index)
        losses = (losses + column_logs) * 0.5
    grads = None
    if gradients:
        grads = shares.exp_()
        if across is not None:
            if scores.shape[0] < scores.shape[1]:
                # A column that is no row's positive has no loss.
                across.mul_(scores.new_zeros(scores.shape[1]).index_fill_(0, pairs.positives, 1))
            grads = grads.add_(across).mul_(0.5)
        grads.scatter_add_(1, index, scores.new_full((scores.shape[0], 1), -1.0))
    return Scored(losses.neg_(), grads, scores)


def _column_softmax(logits, index):
    """(softmax of each column (N, M), its logarithms (N, 1) at the columns `index` (N, 1)).

    The softmax overwrites the logits. log_softmax adds up a column in one float32 sum, which loses
    small shares beside a large one.
    """
    logits -= logits.amax(0)
    positives = logits.gather(1, index)
    shares = logits.exp_()
    sums = shares.sum(0, dtype=wide_dtype(shares.device))
    shares /= sums.to(shares.dtype)
    return shares, positives - sums.log().to(shares.dtype)[index]


def _group_softmax(block, shares, gradients):
    """Softmax with the targets of a row divided by their number; without targets its loss is 0."""
    targets = block.same.to(shares.dtype)
    count = targets.sum(1, keepdim=True)
    targets /= count.clamp(min=1)
    grads = None
    losses = -(targets * shares)
    if gradients:
        grads = shares.exp().mul_(count > 0).sub_(targets)
    return Scored(losses, grads, block.panel)


def _sigmoid(tile, block, scale, bias, gradients):
    """softplus(z) for negatives, softplus(-z) for positives."""
    scores, same = block.panel, block.same
    logits = (scores * scale).add_(bias)
    signed = torch.where(same, -logits, logits)
    losses = softplus(signed)
    grads = None
    if gradients:
        shares = signed.sigmoid_()
        grads = torch.where(same, -shares, shares)
    return Scored(losses, grads, scores)


def _triplet(tile, block, scale, bias, gradients):
    scores, index = block.panel, tile.pairs.positives[:, None]
    positive = scores.gather(1, index)
    negatives = scores.scatter(1, index, LEFT_OUT)
    count, mask = scores.shape[1] - 1, None
    if tile.pairs.row_ids is None:
        mean = (scores.sum(1, keepdim=True) - positive) / count
    else:
        mask = ~(negatives <= LEFT_OUT)
        count = mask.sum(1, keepdim=True)
        mean = torch.where(mask, scores, 0.0).sum(1, keepdim=True) / count
        mean = torch.where(count > 0, mean, LEFT_OUT)
    if tile.kind.startswith("semi"):
        negatives.masked_fill_(negatives > highest_equal(positive), LEFT_OUT)
    closest, first = negatives.max(1, keepdim=True)
    short = positive - tile.margin
    far, near = (mean - short).relu_(), (closest - short).relu_()
    grads = None
    if gradients:
        grad_mean, grad_closest = (far > 0).to(scores.dtype), (near > 0).to(scores.dtype)
        grads = (grad_mean / (count if mask is None else count.clamp(min=1))).expand_as(scores)
        grads = grads.clone() if mask is None else torch.where(mask, grads, 0.0)
        grads.scatter_(1, index, -(grad_mean + grad_closest))
        grads.scatter_add_(1, first, grad_closest)
    return Scored(far + near, grads, scores)


_LOSSES = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "hard_triplet": _triplet,
    "semi-hard_triplet": _triplet,
}

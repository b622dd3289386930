"""A small batch in few operations: both sides' rows at once, the matrix of scores as it is.

Its time is calls, so nothing is kept between a forward pass and the score gradients, both
sides share the operations on rows, and the gradient from above comes in with the last of them. The
arithmetic is that of the dense formulas in the compute type; where rows are multiplied in 16 bits,
score gradients are at most 1 or 2, so that a constant factor fits them to float16.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fastsim.backends.half_rows import LARGEST, LARGEST_GRADIENT
from fastsim.backends.torch import compiled, panels
from fastsim.backends.torch.block import LEFT_OUT, Block
from fastsim.backends.torch.observe import observe
from fastsim.batch_metrics import nothing_seen
from fastsim.precision import inverse_norms, wide_dtype
from fastsim.reduce import softplus
from fastsim.ties import highest_equal

FEW = 1 << 20  # scores of all parts of a softmax, of which plain torch keeps several matrices


class Scored(NamedTuple):
    """What a loss makes of the scores of a block, each in the compute type.

    losses: whose sum is the loss but for the weight; grads (N, M): dL/dlogit; scores (N, M): as
    the logits have them, less a margin.
    """

    losses: Tensor
    grads: Tensor | None
    scores: Tensor


class SmallBatch:
    """The part of `TorchBackend` that serves a small batch."""

    observes_whole = True

    def serves_whole(self, tile, rows, columns, width, together, dtype):
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

    def whole(self, tile, x, y, scale, bias, weights, wants, totals=None, prefixes=None):
        dtype = torch.promote_types(x.dtype, torch.float32)
        sides, graded, *kept = (_unit_rows if tile.cosine else _plain_rows)(self, x, y)
        scores = _product(sides[0], sides[1].t(), dtype)
        place = slice(0, scores.shape[0]), slice(0, scores.shape[1])
        block = Block.of(tile.pairs, place, scores, scores.shape[1], None, None)
        seen = tile.seen if totals is None else nothing_seen(x.shape[0], x.device)
        if seen is not None:
            observe(block, seen)
        if totals is not None:
            totals.copy_(self.batch_totals(seen, *((x, y) if tile.cosine else (None, None))))
        block.leave_out()
        found = _LOSSES[tile.kind](tile, block, scale, bias, wants is not None)
        loss = (found.losses.sum(dtype=wide_dtype(x.device)) * weights).to(dtype)
        if wants is None:
            return (loss,)
        of_numbers = None
        if isinstance(scale, Tensor) or isinstance(bias, Tensor):
            of_numbers = _of_numbers(found, weights)
        grads = found.grads
        if graded[0].dtype != dtype:
            grads = grads.mul_(LARGEST / LARGEST_GRADIENT[tile.kind]).to(graded[0].dtype)
        of_rows = _row_grads(grads, graded, dtype, y is None, wants)
        return loss, *of_rows, of_numbers, *kept

    def whole_gradients(self, tile, grad, found, given, wants, dtype, *, spent=False):
        x, _, scale, _, weights = given
        *row_grads, of_numbers, kept, other = found
        half = self._half(x.device, x.dtype) if tile.cosine else self.dots_of_16_bits(x)
        factor = weights / (LARGEST / LARGEST_GRADIENT[tile.kind]) if half else weights
        factor = factor * scale
        factor = factor if grad is None else grad * factor
        if wants[2] or wants[3]:
            of_numbers = of_numbers if grad is None else of_numbers * grad
        if tile.cosine:
            sides = _input_gradients(row_grads, kept, other, factor, x.shape[0], wants, dtype)
        else:
            sides = _plain_gradients(row_grads, kept, other, factor, x.shape[0], wants, dtype)
        if grad is None:
            # What an operator returns may not share its memory.
            sides = [side if side is None else side.clone() for side in sides]
        return *sides, of_numbers


# ---- rows ----


def _unit_rows(backend, x, y):
    """(both sides as operands of scores, as those of products with score gradients, the unit rows
    of x and y together, or of x for None, in the compute type, and their inverse norms).
    """
    rows = x if y is None else torch.cat((x, y))
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = rows if rows.dtype == dtype else rows.to(dtype)
    inverse = inverse_norms(rows).to(dtype)[:, None]
    unit = rows * inverse
    operands = unit.to(torch.float16) if backend._half(x.device, x.dtype) else unit
    sides = (operands,) * 2 if y is None else operands.split((x.shape[0], y.shape[0]))
    return sides, sides, unit, inverse


def _plain_rows(backend, x, y):
    """The same of scores that are no cosines; in the place of unit rows and norms the sizes of the
    sides (`Backend.dot_rows`), None for 1.
    """
    found = [_plain(backend, side) for side in (x, y) if side is not None]
    sides, graded, sizes = zip(*(found * 2 if y is None else found), strict=True)
    return sides, graded, *sizes


def _plain(backend, x):
    if not backend.dots_of_16_bits(x):
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
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


def _row_grads(grads, sides, dtype, together, wants):
    """Of the rows of both sides (N + M, D) and None, or of each, None where it is not wanted."""
    if together:
        both = _product(grads, sides[1], dtype) if wants[0] else None
        if wants[0]:
            panels.multiply(grads.t(), sides[0], both, accumulate=True)
        return both, None
    if wants[0] and wants[1] and grads.dtype == dtype:
        counts = sides[0].shape[0], sides[1].shape[0]
        found = grads.new_empty((sum(counts), sides[0].shape[1]))
        of_x, of_y = found.split(counts)
        torch.mm(grads, sides[1], out=of_x)
        torch.mm(grads.t(), sides[0], out=of_y)
        return found, None
    of_x = _product(grads, sides[1], dtype) if wants[0] else None
    return of_x, _product(grads.t(), sides[0], dtype) if wants[1] else None


def _input_gradients(unit_grads, unit, inverse, factor, rows, wants, dtype):
    """factor r (g - (u . g) u) for u = r x and g = dL/du: (dL/dx, dL/dy), None where not wanted."""
    both, of_y = unit_grads
    if both is None and of_y is None:
        return None, None
    if both is not None and of_y is None and both.shape == unit.shape:
        found = _backward(both, unit, inverse, factor, dtype)
        if both.shape[0] == rows:
            return found, None
        of_x, of_y = found.split((rows, found.shape[0] - rows))
        return of_x if wants[0] else None, of_y if wants[1] else None
    sides = zip((both, of_y), (slice(0, rows), slice(rows, None)), strict=True)
    return tuple(
        None if grad is None else _backward(grad, unit[part], inverse[part], factor, dtype)
        for grad, part in sides
    )


def _plain_gradients(row_grads, size, other, factor, rows, wants, dtype):
    """(dL/dx, dL/dy) where the scores are no cosines: each is made of the rows of the other side,
    whose size it lacks.
    """
    of_x, of_y = row_grads
    if wants[0] and wants[1] and of_y is None:  # of float32 rows, whose sizes are 1
        of_x, of_y = of_x.split((rows, of_x.shape[0] - rows))
    factors = (factor if lacking is None else factor * lacking for lacking in (other, size))
    pairs = zip((of_x, of_y), factors, strict=True)
    return [None if grad is None else (grad * number).to(dtype) for grad, number in pairs]


def _backward(grad_unit, unit, inverse, factor, dtype):
    dots = (unit * grad_unit).sum(1, keepdim=True, dtype=wide_dtype(unit.device)).to(unit.dtype)
    found = torch.addcmul(grad_unit, unit, dots, value=-1).mul_(inverse * factor)
    return found if found.dtype == dtype else found.to(dtype)


# ---- losses ----


def _of_numbers(found, weights):
    """(2,) dL/dscale and dL/dbias."""
    wide = wide_dtype(found.grads.device)
    # What takes no part has gradient 0.
    along = (found.grads * found.scores).sum(dtype=wide)
    return torch.stack((along, found.grads.sum(dtype=wide))) * weights


def _softmax(tile, block, scale, bias, gradients):
    scores, pairs = block.panel, tile.pairs
    if tile.margin:
        block.add_at_positives(scores.new_full((scores.shape[0], 1), -tile.margin))
    logits = scores * scale
    shares = log_softmax(logits, 1)
    if not pairs.one_positive:
        return _of_groups(block, shares, gradients)
    index = pairs.positives[:, None]
    losses = shares.gather(1, index)
    across = None
    if tile.symmetric:
        across, of_columns = _column_softmax(logits, index)
        losses = (losses + of_columns) * 0.5
    grads = None
    if gradients:
        grads = shares.exp_()
        if across is not None:
            if scores.shape[0] < scores.shape[1]:
                # A column that is nobody's positive.
                across.mul_(scores.new_zeros(scores.shape[1]).index_fill_(0, pairs.positives, 1))
            grads = grads.add_(across).mul_(0.5)
        grads.scatter_add_(1, index, scores.new_full((scores.shape[0], 1), -1.0))
    return Scored(losses.neg_(), grads, scores)


def _column_softmax(logits, index):
    """The shares of each column, and the logarithms (N, 1) of those at the columns `index` (N, 1).

    The shares take the place of the logits. log_softmax adds up a column in one float32 sum, which
    loses small shares beside a large one.
    """
    logits -= logits.amax(0)
    of_index = logits.gather(1, index)
    shares = logits.exp_()
    sums = shares.sum(0, dtype=wide_dtype(shares.device))
    shares /= sums.to(shares.dtype)
    return shares, of_index - sums.log().to(shares.dtype)[index]


def _of_groups(block, shares, gradients):
    """Rows whose targets count in parts of their sum; one without any counts nothing."""
    targets = block.same.to(shares.dtype)
    wanted = targets.sum(1, keepdim=True)
    targets /= wanted.clamp(min=1)
    grads = None
    losses = -(targets * shares)
    if gradients:
        grads = shares.exp().mul_(wanted > 0).sub_(targets)
    return Scored(losses, grads, block.panel)


def _sigmoid(tile, block, scale, bias, gradients):
    """softplus of the logits, of positives of minus the logits."""
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
    count, part = scores.shape[1] - 1, None
    if tile.pairs.row_ids is None:
        mean = (scores.sum(1, keepdim=True) - positive) / count
    else:
        part = ~(negatives <= LEFT_OUT)
        count = part.sum(1, keepdim=True)
        mean = torch.where(part, scores, 0.0).sum(1, keepdim=True) / count
        mean = torch.where(count > 0, mean, LEFT_OUT)
    if tile.kind.startswith("semi"):
        negatives.masked_fill_(negatives > highest_equal(positive), LEFT_OUT)
    closest, first = negatives.max(1, keepdim=True)
    short = positive - tile.margin
    far, near = (mean - short).relu_(), (closest - short).relu_()
    grads = None
    if gradients:
        of_mean, of_closest = (far > 0).to(scores.dtype), (near > 0).to(scores.dtype)
        grads = (of_mean / (count if part is None else count.clamp(min=1))).expand_as(scores)
        grads = grads.clone() if part is None else torch.where(part, grads, 0.0)
        grads.scatter_(1, index, -(of_mean + of_closest))
        grads.scatter_add_(1, first, of_closest)
    return Scored(far + near, grads, scores)


_LOSSES = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "hard_triplet": _triplet,
    "semi-hard_triplet": _triplet,
}

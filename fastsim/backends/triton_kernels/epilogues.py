"""The mathematics of each loss on a tile of scores: what it keeps of it, and its slope dL/ds.

The twin of csrc/epilogue.h. A fold writes the partials of its tile, a slope returns the tile of
slopes. Vocabulary: s score (cosine), z logit, t target. `tile` is (row of tiles, column of tiles,
number of columns of tiles), `row` and `column` the global indices of the scores.
"""

import triton
import triton.language as tl

from fastsim.backends.triton_kernels.pairs import own_pairs, targets

# A pair that takes no part: far below every cosine, finite so that 0 * s stays 0.
LEFT_OUT = tl.constexpr(-1e30)


@triton.jit
def _row_place(row, tile, block):
    """Where the partials of these rows lie in (columns of tiles, rows of the block)."""
    return tile[1].to(tl.int64) * (block.row1 - block.row0) + (row - block.row0)


@triton.jit
def _sum_exponentials(scores, part, scale, AXIS: tl.constexpr):  # noqa: N803
    """Maximum score along the axis, and the sum of the exponentials below it."""
    scores = tl.where(part, scores, LEFT_OUT)
    top = tl.max(scores, AXIS)
    shares = tl.exp(scale * (scores - tl.expand_dims(top, AXIS)))
    # By `part`, not by the maximum: a NaN loses every comparison but must reach the sum.
    return top, tl.sum(tl.where(part, shares, 0.0), AXIS)


# ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----
# L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.


@triton.jit
def _less_margin(scores, row, column, block, pairs, numbers):
    if numbers.margin is not None:
        own = own_pairs(row, column, block, pairs)
        scores = tl.where(own, scores - numbers.margin, scores)
    return scores


@triton.jit
def softmax_fold(scores, part, row, column, tile, block, pairs, numbers, partials):
    scale = tl.load(numbers.scale)
    scores = _less_margin(scores, row, column, block, pairs, numbers)
    at, in_rows = _row_place(row, tile, block), row < block.row1
    top, total = _sum_exponentials(scores, part, scale, 1)
    tl.store(partials.row_top + at, top, mask=in_rows)
    tl.store(partials.row_sum + at, total, mask=in_rows)
    if partials.positive is not None:
        # One tile has the positive, so one program writes the row.
        own = own_pairs(row, column, block, pairs)
        here = tl.max(own.to(tl.int32), 1) > 0
        value = tl.sum(tl.where(own, scores, 0.0), 1)
        tl.store(partials.positive + row - block.row0, value, mask=here & in_rows)
    else:
        target = targets(row, column, part, block, pairs)
        held = tl.sum(tl.where(part, target * scores, 0.0), 1)
        tl.store(partials.target_scores + at, held, mask=in_rows)
        tl.store(partials.target_sums + at, tl.sum(target, 1), mask=in_rows)
    if partials.column_top is not None:
        top, total = _sum_exponentials(scores, part, scale, 0)
        in_columns = column < block.column1
        at = tile[0].to(tl.int64) * (block.column1 - block.column0) + (column - block.column0)
        tl.store(partials.column_top + at, top, mask=in_columns)
        tl.store(partials.column_sum + at, total, mask=in_columns)


@triton.jit
def softmax_slope(scores, part, row, column, block, pairs, numbers, slope):
    in_rows = row < block.row1
    scale = tl.load(numbers.scale)
    scores = _less_margin(scores, row, column, block, pairs, numbers)
    scores = tl.where(part, scores, LEFT_OUT)
    at = row - block.row0
    lse = tl.load(slope.row_lse + at, mask=in_rows, other=0.0)
    weight = tl.load(slope.row_weight + at, mask=in_rows, other=0.0)
    # z - lse first, in one rounding: near a probability of 1 the two are large and close.
    out = weight[:, None] * tl.exp(scale * scores - lse[:, None])
    if slope.column_lse is not None:
        in_columns = column < block.column1
        at = column - block.column0
        lse = tl.load(slope.column_lse + at, mask=in_columns, other=0.0)
        weight = tl.load(slope.column_weight + at, mask=in_columns, other=0.0)
        out += weight[None, :] * tl.exp(scale * scores - lse[None, :])
    at = row - block.row0
    weight = tl.load(slope.target_weight + at, mask=in_rows, other=0.0)
    return out - weight[:, None] * targets(row, column, part, block, pairs)


# ---- elementwise losses ----


@triton.jit
def _log_one_plus(e):
    """log(1 + e) for 0 <= e <= 1: 2 artanh(e / (2 + e)), exact in relative terms to e = 0."""
    u = e / (2.0 + e)
    square = u * u
    series = square * (1.0 / 15.0) + (1.0 / 13.0)
    series = series * square + (1.0 / 11.0)
    series = series * square + (1.0 / 9.0)
    series = series * square + (1.0 / 7.0)
    series = series * square + (1.0 / 5.0)
    series = series * square + (1.0 / 3.0)
    series = series * square + 1.0
    return 2.0 * u * series


@triton.jit
def _logit(scores, numbers):
    return tl.load(numbers.scale) * scores + tl.load(numbers.bias)


@triton.jit
def _sigmoid_excess(logit, wanted):
    """sigma(z) - wanted, and e^-|z|."""
    e = tl.exp(-tl.abs(logit))
    share = 1.0 / (1.0 + e)
    return tl.where(logit < 0, e * share, share) - wanted, e


@triton.jit
def _row_weight(row, block, slope):
    return tl.load(slope.row + row - block.row0, mask=row < block.row1, other=0.0)


# SigLIP: binary cross entropy of z = scale s + bias against (t + 1) / 2.
@triton.jit
def sigmoid_fold(scores, part, row, column, tile, block, pairs, numbers, partials):
    logit = _logit(scores, numbers)
    wanted = 0.5 * targets(row, column, part, block, pairs) + 0.5
    excess, e = _sigmoid_excess(logit, wanted)
    loss = tl.where(logit < 0, 0.0, logit) - wanted * logit + _log_one_plus(e)
    at, in_rows = _row_place(row, tile, block), row < block.row1
    tl.store(partials.loss + at, tl.sum(tl.where(part, loss, 0.0), 1), mask=in_rows)
    tl.store(partials.slope + at, tl.sum(tl.where(part, excess, 0.0), 1), mask=in_rows)


@triton.jit
def sigmoid_slope(scores, part, row, column, block, pairs, numbers, slope):
    weight = _row_weight(row, block, slope) * tl.load(numbers.scale)
    wanted = 0.5 * targets(row, column, part, block, pairs) + 0.5
    excess, _ = _sigmoid_excess(_logit(scores, numbers), wanted)
    return tl.where(part, weight[:, None] * excess, 0.0)


@triton.jit
def squared_error_fold(scores, part, row, column, tile, block, pairs, numbers, partials):
    difference = scores - targets(row, column, part, block, pairs)
    loss = tl.sum(tl.where(part, difference * difference, 0.0), 1)
    tl.store(partials.loss + _row_place(row, tile, block), loss, mask=row < block.row1)


@triton.jit
def squared_error_slope(scores, part, row, column, block, pairs, numbers, slope):
    weight = _row_weight(row, block, slope)
    difference = scores - targets(row, column, part, block, pairs)
    return tl.where(part, 2.0 * weight[:, None] * difference, 0.0)


# ---- CoSENT over a matrix ----
# Level l keeps A_l = lse z and B_l = lse -z; the slope in level l, in units of dL/dz, is
# e^{z + above_l} - e^{-z + below_l}, above_l = lse_{m>l} B_m - L, below_l = lse_{m<l} A_m - L.


@triton.jit
def levels_fold(scores, part, row, column, tile, block, pairs, numbers, partials):
    scale = tl.load(numbers.scale)
    target = targets(row, column, part, block, pairs)
    out = partials.out + (tile[0].to(tl.int64) * tile[2] + tile[1]) * 4 * partials.count
    flat: tl.constexpr = scores.shape[0] * scores.shape[1]
    scores = tl.reshape(scores, [flat])
    for level in range(partials.count):
        here = part & (target == tl.load(partials.values + level))
        here = tl.reshape(here, [flat])
        top, total = _sum_exponentials(scores, here, scale, 0)
        tl.store(out + level, top)
        tl.store(out + partials.count + level, total)
        top, total = _sum_exponentials(-scores, here, scale, 0)
        tl.store(out + 2 * partials.count + level, top)
        tl.store(out + 3 * partials.count + level, total)


@triton.jit
def levels_slope(scores, part, row, column, block, pairs, numbers, slope):
    logit = tl.load(numbers.scale) * scores
    target = targets(row, column, part, block, pairs)
    above = tl.full(scores.shape, LEFT_OUT, tl.float32)
    below = tl.full(scores.shape, LEFT_OUT, tl.float32)
    for level in range(slope.count):
        here = part & (target == tl.load(slope.values + level))
        above = tl.where(here, tl.load(slope.above + level), above)
        below = tl.where(here, tl.load(slope.below + level), below)
    return tl.load(slope.factor) * (tl.exp(above + logit) - tl.exp(below - logit))


# ---- selection: the closest negative of the triplet loss ----


@triton.jit
def closest_fold(scores, part, row, column, tile, block, pairs, numbers, partials):
    in_rows = row < block.row1
    # A NaN is no candidate; it reaches the loss through the mean negative.
    admitted = part & (own_pairs(row, column, block, pairs) == 0) & (scores == scores)
    if partials.ceiling is not None:
        ceiling = tl.load(partials.ceiling + row - block.row0, mask=in_rows, other=0.0)
        admitted = admitted & (scores <= ceiling[:, None])
    masked = tl.where(admitted, scores, LEFT_OUT)
    top = tl.max(masked, 1)
    # The smallest column among equals.
    first = tl.min(tl.where(masked == top[:, None], column[None, :], 2147483647), 1)
    at = _row_place(row, tile, block)
    tl.store(partials.top + at, top, mask=in_rows)
    tl.store(partials.column + at, first, mask=in_rows)


@triton.jit
def positive_fold(scores, part, row, column, tile, block, pairs, numbers, partials):
    """On a diagonal tile, whose column j is the positive of row j."""
    value = tl.sum(tl.where(row[:, None] == column[None, :], scores, 0.0), 1)
    tl.store(partials.out + row - block.row0, value, mask=row < block.row1)

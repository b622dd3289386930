"""The mathematics of each loss on a tile of scores: what it keeps of it, and its score gradient
dL/ds.

The twin of csrc/epilogue.h. A forward reduction writes the partials of its tile, a score gradient
returns the tile of score gradients. Vocabulary: s score (cosine), z logit, t target. A pair that
takes no part has the score LEFT_OUT; no mask is kept beside the scores, for a tile of them fills
the registers. `row` and `column` are the global indices of the scores, `tile` is (row of tiles,
column of tiles, number of columns of tiles).
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import (
    LEFT_OUT,
    own_group,
    own_pairs,
    row_place,
    targets,
)


@triton.jit
def _pair_mask(scores, values):
    """The values of pairs that take part, 0 for the others; a NaN score takes part."""
    return tl.where(scores <= LEFT_OUT, 0.0, values)


@triton.jit
def _sum_exponentials(scores, scale, AXIS: tl.constexpr):  # noqa: N803
    """Maximum score along the axis, and the sum of the exponentials below it."""
    top = tl.max(scores, AXIS)
    shares = tl.exp(scale * (scores - tl.expand_dims(top, AXIS)))
    return top, tl.sum(_pair_mask(scores, shares), AXIS)


# ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----
# L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.


@triton.jit
def _less_margin(scores, row, column, block, pairs, numbers):
    if numbers.margin is not None:
        own = own_pairs(row, column, block, pairs)
        scores = tl.where(own, scores - numbers.margin, scores)
    return scores


@triton.jit
def softmax_forward(scores, row, column, tile, block, pairs, numbers, partials):
    scale = tl.load(numbers.scale)
    scores = _less_margin(scores, row, column, block, pairs, numbers)
    at, in_rows = row_place(row, tile, block), row < block.row1
    if partials.positive is not None:
        value = tl.sum(tl.where(own_pairs(row, column, block, pairs), scores, 0.0), 1)
        # One tile has the positive, so one program writes the row.
        positive = tl.load(pairs.positives + row, mask=in_rows, other=-1)
        first = tl.min(column, 0)
        here = (positive >= first) & (positive < first + column.shape[0])
        tl.store(partials.positive + row - block.row0, value, mask=here & in_rows)
    elif partials.target_scores is not None:
        target = _pair_mask(scores, targets(row, column, block, pairs))
        tl.store(partials.target_scores + at, tl.sum(target * scores, 1), mask=in_rows)
        tl.store(partials.target_sums + at, tl.sum(target, 1), mask=in_rows)
    top, total = _sum_exponentials(scores, scale, 1)
    tl.store(partials.row_top + at, top, mask=in_rows)
    tl.store(partials.row_sum + at, total, mask=in_rows)
    if partials.column_top is not None:
        top, total = _sum_exponentials(scores, scale, 0)
        in_columns = column < block.column1
        at = tile[0].to(tl.int64) * (block.column1 - block.column0) + (column - block.column0)
        tl.store(partials.column_top + at, top, mask=in_columns)
        tl.store(partials.column_sum + at, total, mask=in_columns)


@triton.jit
def softmax_score_grad(scores, row, column, block, pairs, numbers, score_grad):
    in_rows = row < block.row1
    scale = tl.load(numbers.scale)
    scores = _less_margin(scores, row, column, block, pairs, numbers)
    at = row - block.row0
    # Past the edge a maximum above every score: its exponential is 0, never infinite.
    top = tl.load(score_grad.row_top + at, mask=in_rows, other=-LEFT_OUT)
    weight = tl.load(score_grad.row_weight + at, mask=in_rows, other=0.0)
    out = weight[:, None] * tl.exp(scale * (scores - top[:, None]))
    if score_grad.column_top is not None:
        in_columns = column < block.column1
        at = column - block.column0
        top = tl.load(score_grad.column_top + at, mask=in_columns, other=-LEFT_OUT)
        weight = tl.load(score_grad.column_weight + at, mask=in_columns, other=0.0)
        out += weight[None, :] * tl.exp(scale * (scores - top[None, :]))
    at = row - block.row0
    weight = tl.load(score_grad.target_weight + at, mask=in_rows, other=0.0)
    target = _pair_mask(scores, targets(row, column, block, pairs))
    return out - weight[:, None] * target


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
def _row_weight(row, block, score_grad):
    return tl.load(score_grad.row + row - block.row0, mask=row < block.row1, other=0.0)


# SigLIP: binary cross entropy of z = scale s + bias against (t + 1) / 2.
@triton.jit
def sigmoid_forward(scores, row, column, tile, block, pairs, numbers, partials):
    logit = _logit(scores, numbers)
    wanted = 0.5 * targets(row, column, block, pairs) + 0.5
    excess, e = _sigmoid_excess(logit, wanted)
    at, in_rows = row_place(row, tile, block), row < block.row1
    tl.store(partials.score_grad + at, tl.sum(_pair_mask(scores, excess), 1), mask=in_rows)
    loss = tl.where(logit < 0, 0.0, logit) - wanted * logit + _log_one_plus(e)
    tl.store(partials.loss + at, tl.sum(_pair_mask(scores, loss), 1), mask=in_rows)


@triton.jit
def sigmoid_score_grad(scores, row, column, block, pairs, numbers, score_grad):
    weight = _row_weight(row, block, score_grad) * tl.load(numbers.scale)
    wanted = 0.5 * targets(row, column, block, pairs) + 0.5
    excess, _ = _sigmoid_excess(_logit(scores, numbers), wanted)
    return weight[:, None] * _pair_mask(scores, excess)


@triton.jit
def squared_error_forward(scores, row, column, tile, block, pairs, numbers, partials):
    difference = _pair_mask(scores, scores - targets(row, column, block, pairs))
    loss = tl.sum(difference * difference, 1)
    tl.store(partials.loss + row_place(row, tile, block), loss, mask=row < block.row1)


@triton.jit
def squared_error_score_grad(scores, row, column, block, pairs, numbers, score_grad):
    difference = _pair_mask(scores, scores - targets(row, column, block, pairs))
    return 2.0 * _row_weight(row, block, score_grad)[:, None] * difference


# ---- positives against negatives: multi-similarity, NT-Xent ----


@triton.jit
def _sides(scores, row, column, block, pairs):
    """The negatives' scores and the negated positives', each LEFT_OUT in the other's places."""
    own = own_group(row, column, block, pairs)
    positive = own & ((scores <= LEFT_OUT) == 0)
    return tl.where(own, LEFT_OUT, scores), tl.where(positive, -scores, LEFT_OUT)


@triton.jit
def contrast_forward(scores, row, column, tile, block, pairs, numbers, partials):
    rising, falling = _sides(scores, row, column, block, pairs)
    at, in_rows = row_place(row, tile, block), row < block.row1
    top, total = _sum_exponentials(rising, tl.load(numbers.scale), 1)
    tl.store(partials.negative_top + at, top, mask=in_rows)
    tl.store(partials.negative_sum + at, total, mask=in_rows)
    if partials.positive_top is not None:
        top, total = _sum_exponentials(falling, tl.load(numbers.positive_scale), 1)
        tl.store(partials.positive_top + at, top, mask=in_rows)
        tl.store(partials.positive_sum + at, total, mask=in_rows)


@triton.jit
def _weighted_share(scores, scale, tops, weights, row, block):
    """By row, weight * exp(scale (s - top))."""
    at, in_rows = row - block.row0, row < block.row1
    # Past the edge a maximum above every score: its exponential is 0, never infinite.
    top = tl.load(tops + at, mask=in_rows, other=-LEFT_OUT)
    weight = tl.load(weights + at, mask=in_rows, other=0.0)
    return weight[:, None] * tl.exp(scale * (scores - top[:, None]))


@triton.jit
def multi_similarity_score_grad(scores, row, column, block, pairs, numbers, score_grad):
    rising, falling = _sides(scores, row, column, block, pairs)
    scale, positive_scale = tl.load(numbers.scale), tl.load(numbers.positive_scale)
    up = _weighted_share(
        rising, scale, score_grad.negative_top, score_grad.negative_weight, row, block
    )
    tops, weights = score_grad.positive_top, score_grad.positive_weight
    return up - _weighted_share(falling, positive_scale, tops, weights, row, block)


@triton.jit
def _positive_term(falling, scale, tops, log_sums, row, block):
    """softplus(lse of the negatives - z) of the positives, its score gradient; 0 for others."""
    at, in_rows = row - block.row0, row < block.row1
    top = tl.load(tops + at, mask=in_rows, other=0.0)
    log_sum = tl.load(log_sums + at, mask=in_rows, other=0.0)
    x = scale * (top[:, None] + falling) + log_sum[:, None]
    e = tl.exp(-tl.abs(x))
    share = 1.0 / (1.0 + e)
    loss = tl.where(x < 0, 0.0, x) + _log_one_plus(e)
    score_grad = tl.where(x < 0, e * share, share)
    return _pair_mask(falling, loss), _pair_mask(falling, score_grad)


@triton.jit
def multi_positive_forward(scores, row, column, tile, block, pairs, numbers, partials):
    _, falling = _sides(scores, row, column, block, pairs)
    scale = tl.load(numbers.scale)
    loss, score_grad = _positive_term(falling, scale, partials.top, partials.log_sum, row, block)
    at, in_rows = row_place(row, tile, block), row < block.row1
    tl.store(partials.loss + at, tl.sum(loss, 1), mask=in_rows)
    tl.store(partials.score_grad + at, tl.sum(score_grad, 1), mask=in_rows)


@triton.jit
def multi_positive_score_grad(scores, row, column, block, pairs, numbers, score_grad):
    rising, falling = _sides(scores, row, column, block, pairs)
    scale = tl.load(numbers.scale)
    up = _weighted_share(
        rising, scale, score_grad.negative_top, score_grad.negative_weight, row, block
    )
    _, pull = _positive_term(
        falling, scale, score_grad.negative_top, score_grad.log_sum, row, block
    )
    at, in_rows = row - block.row0, row < block.row1
    weight = tl.load(score_grad.positive_weight + at, mask=in_rows, other=0.0)
    return up - weight[:, None] * pull


# ---- CoSENT over a matrix ----
# Level l keeps A_l = lse z and B_l = lse -z, each as maximum and sum. The score gradient in level l
# is up_l e^{scale (s - high_l)} - down_l e^{scale (-s - low_l)}, relative to the level's own
# extremes.


@triton.jit
def _sum_all_exponentials(scores, scale):
    top = tl.max(tl.max(scores, 1), 0)
    shares = _pair_mask(scores, tl.exp(scale * (scores - top)))
    return top, tl.sum(tl.sum(shares, 1), 0)


@triton.jit
def levels_forward(scores, row, column, tile, block, pairs, numbers, partials):
    scale, size = tl.load(numbers.scale), partials.size
    target = targets(row, column, block, pairs)
    out = partials.out + (tile[0].to(tl.int64) * tile[2] + tile[1]) * 4 * size
    for level in range(size):
        # A NaN compares false with LEFT_OUT, so it stays in its level.
        here = (target == tl.load(partials.levels + level)) & ((scores <= LEFT_OUT) == 0)
        top, total = _sum_all_exponentials(tl.where(here, scores, LEFT_OUT), scale)
        tl.store(out + level, top)
        tl.store(out + size + level, total)
        top, total = _sum_all_exponentials(tl.where(here, -scores, LEFT_OUT), scale)
        tl.store(out + 2 * size + level, top)
        tl.store(out + 3 * size + level, total)


@triton.jit
def levels_score_grad(scores, row, column, block, pairs, numbers, score_grad):
    target = targets(row, column, block, pairs)
    scale, s = tl.load(numbers.scale), _pair_mask(scores, scores)
    out = tl.zeros(scores.shape, tl.float32)
    for level in range(score_grad.size):
        here = target == tl.load(score_grad.levels + level)
        high = tl.where(here, s - tl.load(score_grad.high + level), 0.0)
        low = tl.where(here, -s - tl.load(score_grad.low + level), 0.0)
        rising = tl.load(score_grad.up + level) * tl.exp(scale * high)
        falling = tl.load(score_grad.down + level) * tl.exp(scale * low)
        out = tl.where(here, rising - falling, out)
    return _pair_mask(scores, out)


# ---- selection: the closest negative of the triplet loss, the hardest pairs by group ----


@triton.jit
def _first_column(scores, top, column):
    """The smallest column among equals of the row's extreme."""
    return tl.min(tl.where(scores == top[:, None], column[None, :], 2147483647), 1)


@triton.jit
def closest_forward(scores, row, column, tile, block, pairs, numbers, partials):
    in_rows = row < block.row1
    # A NaN is no candidate; it reaches the loss through the mean negative.
    admitted = (own_pairs(row, column, block, pairs) == 0) & (scores == scores)
    if partials.ceiling is not None:
        ceiling = tl.load(partials.ceiling + row - block.row0, mask=in_rows, other=0.0)
        admitted = admitted & (scores <= ceiling[:, None])
    scores = tl.where(admitted, scores, LEFT_OUT)
    top = tl.max(scores, 1)
    at = row_place(row, tile, block)
    tl.store(partials.top + at, top, mask=in_rows)
    tl.store(partials.column + at, _first_column(scores, top, column), mask=in_rows)


@triton.jit
def hardest_forward(scores, row, column, tile, block, pairs, numbers, partials):
    in_rows, in_columns = row < block.row1, column < block.column1
    own = own_group(row, column, block, pairs)
    # A NaN is no candidate.
    part = scores > LEFT_OUT
    if partials.offsets is not None:
        offset = tl.load(partials.offsets + column, mask=in_columns, other=0.0)
        scores -= offset[None, :]
    at = row_place(row, tile, block)
    positives = tl.where(part & own, scores, -LEFT_OUT)
    low = tl.min(positives, 1)
    tl.store(partials.low + at, low, mask=in_rows)
    tl.store(partials.low_column + at, _first_column(positives, low, column), mask=in_rows)
    negatives = tl.where(part & (own == 0), scores, LEFT_OUT)
    high = tl.max(negatives, 1)
    tl.store(partials.high + at, high, mask=in_rows)
    tl.store(partials.high_column + at, _first_column(negatives, high, column), mask=in_rows)

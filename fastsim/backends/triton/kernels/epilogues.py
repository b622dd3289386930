"""The mathematics of each loss on a tile of scores: what it keeps of it, and its score gradient
dL/ds.

The twin of csrc/epilogue.h. Every epilogue takes the same and returns (values of rows, values of
columns, score gradients), each a tuple, empty where it has none:

scores (R, C): s, the cosines; LEFT_OUT of a pair that takes no part. No mask is kept beside them,
    for a tile of scores fills the registers.
target (R, C), own (R, C): the targets, and whether the column is the row's positive.
column (C,): their indices.
numbers: scale, bias, margin and positive_scale of the loss, 0 where it has none.
of_rows, of_columns: tuples of (R, 1) and (1, C), what `fastsim.kinds` calls coefficients.
levels: of CoSENT over a matrix alone, see there.
SCORE_GRAD: whether an epilogue with both is asked for score gradients too.

A value that nobody stores is not computed: the compiler drops it. A product and a sum that are to
be rounded once are written `tl.fma`; no others are joined, so that s - max is 0 at the maximum.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import LEFT_OUT

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _taking_part(scores, values):
    """The values of pairs that take part, 0 for the others; a NaN score takes part."""
    return tl.where(scores <= LEFT_OUT, 0.0, values)


@triton.jit
def _sum_exponentials(scores, scale, AXIS: tl.constexpr):  # noqa: N803
    """Maximum score along the axis, and the sum of the exponentials below it."""
    top = tl.max(scores, AXIS)
    # Without any pair relative to 0, so that no exponential of it is 1.
    below = tl.where(top <= LEFT_OUT, 0.0, top)
    shares = tl.exp2((scale * LOG2_E) * (scores - tl.expand_dims(below, AXIS)))
    return top, tl.sum(shares, AXIS)


@triton.jit
def _weighted_share(scores, scale, top, weight):
    """weight * exp(scale (s - top))."""
    return weight * tl.exp2((scale * LOG2_E) * (scores - top))


# ---- normalised losses: InfoNCE, SupCon, matrix cross entropy ----
# L_i = T_i lse_j z_ij - sum_j t_ij z_ij with z = scale s and T_i = sum_j t_ij.


@triton.jit
def _less_margin(scores, own, numbers):
    _, _, margin, _ = numbers
    if margin is not None:
        scores = tl.where(own, scores - margin, scores)
    return scores


@triton.jit
def softmax_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: maximum, sum of exponentials, sum of t s, sum of t. Columns: the first two."""
    scale, _, _, _ = numbers
    scores = _less_margin(scores, own, numbers)
    target = _taking_part(scores, target)
    top, total = _sum_exponentials(scores, scale, 1)
    rows = (top, total, tl.sum(target * scores, 1), tl.sum(target, 1))
    return rows, _sum_exponentials(scores, scale, 0), ()


@triton.jit
def softmax_score_grad(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    scores = _less_margin(scores, own, numbers)
    top, weight, target_weight = of_rows
    out = _weighted_share(scores, scale, top, weight)
    if len(of_columns) == 2:
        top, weight = of_columns
        out += _weighted_share(scores, scale, top, weight)
    return (), (), (out - target_weight * _taking_part(scores, target),)


# ---- elementwise losses ----


@triton.jit
def _log_one_plus(e):
    """log(1 + e) for e >= 0, exact in relative terms to e = 0: 2 artanh(e / (2 + e)) to e = 1."""
    u = e / (2.0 + e)
    square = u * u
    series = tl.fma(square, 1.0 / 15.0, 1.0 / 13.0)
    series = tl.fma(series, square, 1.0 / 11.0)
    series = tl.fma(series, square, 1.0 / 9.0)
    series = tl.fma(series, square, 1.0 / 7.0)
    series = tl.fma(series, square, 1.0 / 5.0)
    series = tl.fma(series, square, 1.0 / 3.0)
    series = tl.fma(series, square, 1.0)
    return tl.where(e <= 1.0, 2.0 * u * series, tl.log(1.0 + e))


@triton.jit
def _both(a, b):
    """(1 + a) (1 + b) - 1."""
    return tl.fma(a, b, a + b)


@triton.jit
def _sum_logs_one_plus(e):
    """sum_j log(1 + e_j) of each row, 0 <= e_j <= 1: the logarithm of the product, one a row.

    One for every 64 columns: 2^64 is far from the end of the range.
    """
    columns: tl.constexpr = e.shape[1]
    if columns <= 64:
        return _log_one_plus(tl.reduce(e, 1, _both))
    else:
        split: tl.constexpr = (e.shape[0], columns // 64, 64)
        return tl.sum(_log_one_plus(tl.reduce(tl.reshape(e, split), 2, _both)), 1)


@triton.jit
def _sigmoid(logit):
    """sigma(z), and e^-|z|."""
    e = tl.exp2(tl.abs(logit) * -LOG2_E)
    # A division looks after the ends of the range, six instructions; 1 + e is in [1, 2].
    root = tl.rsqrt(1.0 + e)
    share = root * root
    return tl.where(logit < 0, e * share, share), e


# SigLIP: binary cross entropy of z = scale s + bias against (t + 1) / 2.
@triton.jit
def sigmoid(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: sum of the losses, sum of dL/dz."""
    scale, bias, _, _ = numbers
    # A pair that takes no part: a logit of minus infinity and no target, so that all is 0.
    logit = tl.where(scores <= LEFT_OUT, LEFT_OUT, tl.fma(scores, scale, bias))
    wanted = _taking_part(scores, tl.fma(target, 0.5, 0.5))
    share, e = _sigmoid(logit)
    excess = share - wanted
    # softplus(z) - wanted z, of which log(1 + e^-|z|) is summed by a product.
    rest = tl.where(logit < 0, 0.0, logit) - wanted * logit
    rows = tl.sum(rest, 1) + _sum_logs_one_plus(e), tl.sum(excess, 1)
    if SCORE_GRAD:
        return rows, (), ((of_rows[0] * scale) * excess,)
    else:
        return rows, (), ()


@triton.jit
def squared_error(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: sum of the losses."""
    difference = _taking_part(scores, scores - target)
    rows = (tl.sum(difference * difference, 1),)
    if SCORE_GRAD:
        return rows, (), ((2.0 * of_rows[0]) * difference,)
    else:
        return rows, (), ()


# ---- positives against negatives: multi-similarity, NT-Xent ----


@triton.jit
def _sides(scores, target):
    """The negatives' scores and the negated positives', each LEFT_OUT in the other's places."""
    own = target == 1.0
    positive = own & ((scores <= LEFT_OUT) == 0)
    return tl.where(own, LEFT_OUT, scores), tl.where(positive, -scores, LEFT_OUT)


@triton.jit
def contrast_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: maximum and sum of exponentials of the negatives, of the negated positives."""
    scale, _, _, positive_scale = numbers
    rising, falling = _sides(scores, target)
    negatives = _sum_exponentials(rising, scale, 1)
    return negatives + _sum_exponentials(falling, positive_scale, 1), (), ()


@triton.jit
def multi_similarity_score_grad(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, positive_scale = numbers
    rising, falling = _sides(scores, target)
    top, weight, positive_top, positive_weight = of_rows
    up = _weighted_share(rising, scale, top, weight)
    return (), (), (up - _weighted_share(falling, positive_scale, positive_top, positive_weight),)


@triton.jit
def _positive_terms(falling, scale, top, log_sum):
    """sigma(x) and e^-|x|, 0 where there is no positive, and max(x, 0).

    x is the log-sum-exp of the negatives less z, a positive's; its loss is softplus(x).
    """
    x = tl.fma(top + falling, scale, log_sum)
    share, e = _sigmoid(x)
    rest = _taking_part(falling, tl.where(x < 0, 0.0, x))
    return _taking_part(falling, share), _taking_part(falling, e), rest


@triton.jit
def multi_positive_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: sums of the positives' losses and of their dL/dx."""
    scale, _, _, _ = numbers
    _, falling = _sides(scores, target)
    top, log_sum = of_rows
    share, e, rest = _positive_terms(falling, scale, top, log_sum)
    return (tl.sum(rest, 1) + _sum_logs_one_plus(e), tl.sum(share, 1)), (), ()


@triton.jit
def multi_positive_score_grad(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    rising, falling = _sides(scores, target)
    top, weight, log_sum, positive_weight = of_rows
    share, _, _ = _positive_terms(falling, scale, top, log_sum)
    return (), (), (_weighted_share(rising, scale, top, weight) - positive_weight * share,)


# ---- CoSENT over a matrix ----
# Level l keeps A_l = lse z and B_l = lse -z, each as maximum and sum. The score gradient in level l
# is up_l e^{scale (s - high_l)} - down_l e^{scale (-s - low_l)}, relative to the level's own
# extremes. Every score is of one level: a look at all levels finds what belongs to it, and two
# exponentials a score are enough. `levels`: their values (K,), K, and what is written or read of
# each, (4, K).


@triton.jit
def _largest(values):
    return tl.max(tl.max(values, 1), 0)


@triton.jit
def levels_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    values, size, out = levels
    # A NaN compares false with LEFT_OUT, so it stays in its level.
    part = (scores <= LEFT_OUT) == 0
    high, low = scores, -scores
    for level in range(size):
        here = (target == tl.load(values + level)) & part
        top = _largest(tl.where(here, scores, LEFT_OUT))
        bottom = _largest(tl.where(here, -scores, LEFT_OUT))
        tl.store(out + level, top)
        tl.store(out + 2 * size + level, bottom)
        high, low = tl.where(here, top, high), tl.where(here, bottom, low)
    rising = tl.exp2((scale * LOG2_E) * (scores - high))
    falling = tl.exp2((scale * LOG2_E) * (-scores - low))
    for level in range(size):
        here = (target == tl.load(values + level)) & part
        tl.store(out + size + level, tl.sum(tl.sum(tl.where(here, rising, 0.0), 1), 0))
        tl.store(out + 3 * size + level, tl.sum(tl.sum(tl.where(here, falling, 0.0), 1), 0))
    return (), (), ()


@triton.jit
def levels_score_grad(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    values, size, of_level = levels
    part = (scores <= LEFT_OUT) == 0
    # A pair that takes no part stays with numbers of 0: a level without pairs has no extremes.
    s = tl.where(part, scores, 0.0)
    high, up = tl.zeros_like(s), tl.zeros_like(s)
    low, down = tl.zeros_like(s), tl.zeros_like(s)
    for level in range(size):
        here = (target == tl.load(values + level)) & part
        high = tl.where(here, tl.load(of_level + level), high)
        up = tl.where(here, tl.load(of_level + size + level), up)
        low = tl.where(here, tl.load(of_level + 2 * size + level), low)
        down = tl.where(here, tl.load(of_level + 3 * size + level), down)
    return (), (), (_weighted_share(s, scale, high, up) - _weighted_share(-s, scale, low, down),)


# ---- selection: the closest negative of the triplet loss, the hardest pairs by group ----


@triton.jit
def _first_column(scores, top, column):
    """The smallest column among equals of the row's extreme, its bits as float32."""
    first = tl.min(tl.where(scores == top[:, None], column[None, :], 2147483647), 1)
    return first.to(tl.float32, bitcast=True)


@triton.jit
def closest_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: the largest admitted score, its column. of_rows: where it has one, the ceiling."""
    # A NaN is no candidate; it reaches the loss through the mean negative.
    admitted = (own == 0) & (scores == scores)
    if len(of_rows) == 1:
        admitted = admitted & (scores <= of_rows[0])
    scores = tl.where(admitted, scores, LEFT_OUT)
    top = tl.max(scores, 1)
    return (top, _first_column(scores, top, column)), (), ()


@triton.jit
def hardest_forward(
    scores,
    target,
    own,
    column,
    numbers,
    of_rows,
    of_columns,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    """Rows: minus the lowest score of the group and the highest outside, each with its column.

    of_columns: where there are any, what is taken from the scores.
    """
    # A NaN is no candidate.
    part = scores > LEFT_OUT
    if len(of_columns) == 1:
        scores -= of_columns[0]
    positives = tl.where(part & (target == 1.0), -scores, LEFT_OUT)
    low = tl.max(positives, 1)
    negatives = tl.where(part & (target != 1.0), scores, LEFT_OUT)
    high = tl.max(negatives, 1)
    low_column = _first_column(positives, low, column)
    return (low, low_column, high, _first_column(negatives, high, column)), (), ()

"""Terms that several epilogues share."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import LEFT_OUT

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def taking_part(scores, values):
    """The values, 0 for pairs that are left out; a pair with a NaN score is not."""
    return tl.where(scores <= LEFT_OUT, 0.0, values)


@triton.jit
def sum_exponentials(scores, scale, AXIS: tl.constexpr):  # noqa: N803
    """(maximum score along the axis, sum of the exponentials relative to it)."""
    top = tl.max(scores, AXIS)
    # If all pairs are left out, relative to 0, so that no exponential is 1.
    below = tl.where(top <= LEFT_OUT, 0.0, top)
    shares = tl.exp2((scale * LOG2_E) * (scores - tl.expand_dims(below, AXIS)))
    return top, tl.sum(shares, AXIS)


@triton.jit
def weighted_share(scores, scale, top, weight):
    """weight * exp(scale (s - top))."""
    return weight * tl.exp2((scale * LOG2_E) * (scores - top))


@triton.jit
def log_one_plus(e):
    """log(1 + e), e >= 0, of small relative error down to 0: 2 artanh(e / (2 + e)) if e <= 1."""
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
def sum_logs_one_plus(e):
    """sum_j log(1 + e_j) of each row, for 0 <= e_j <= 1, as logarithms of products.

    There is one logarithm for every 64 columns: a product of 64 factors is at most 2^64, far below
    the end of the range.
    """
    columns: tl.constexpr = e.shape[1]
    if columns <= 64:
        return log_one_plus(tl.reduce(e, 1, _both))
    else:
        split: tl.constexpr = (e.shape[0], columns // 64, 64)
        return tl.sum(log_one_plus(tl.reduce(tl.reshape(e, split), 2, _both)), 1)


@triton.jit
def shares_and_exponential(logit):
    """sigma(z), sigma(-z) and e^-|z|."""
    e = tl.exp2(tl.abs(logit) * -LOG2_E)
    # 1 / (1 + e) as rsqrt squared: a division takes six instructions, for the ends of a range that
    # 1 + e, in [1, 2], never reaches.
    root = tl.rsqrt(1.0 + e)
    large = root * root
    small = e * large
    return tl.where(logit < 0, small, large), tl.where(logit < 0, large, small), e

"""Terms that several epilogues share."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import LEFT_OUT

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def zero_left_out(scores, values):
    """The values, with 0 for pairs that are left out. A pair with a NaN score is not left out."""
    return tl.where(scores <= LEFT_OUT, 0.0, values)


@triton.jit
def sum_exponentials(scores, scale, AXIS: tl.constexpr):  # noqa: N803
    """(maximum score along the axis, sum of the exponentials relative to it)."""
    top = tl.max(scores, AXIS)
    # If all pairs are left out, exponentials are taken relative to 0, so that they are 0, not 1.
    reference = tl.where(top <= LEFT_OUT, 0.0, top)
    shares = tl.exp2((scale * LOG2_E) * (scores - tl.expand_dims(reference, AXIS)))
    return top, tl.sum(shares, AXIS)


@triton.jit
def weighted_share(scores, scale, top, weight):
    """weight * exp(scale (s - top))."""
    return weight * tl.exp2((scale * LOG2_E) * (scores - top))


@triton.jit
def log_one_plus(e):
    """log(1 + e) for e >= 0, with a small relative error down to e = 0.

    It is 2 artanh(e / (2 + e)), computed by a series if e <= 1.
    """
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
def _joint_product(a, b):
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
        return log_one_plus(tl.reduce(e, 1, _joint_product))
    else:
        split: tl.constexpr = (e.shape[0], columns // 64, 64)
        return tl.sum(log_one_plus(tl.reduce(tl.reshape(e, split), 2, _joint_product)), 1)


@triton.jit
def sigmoids_and_exponential(logit):
    """sigma(z), sigma(-z) and e^-|z|."""
    e = tl.exp2(tl.abs(logit) * -LOG2_E)
    # 1 / (1 + e) is computed as rsqrt squared. A division takes six instructions, which serve the
    # ends of the float32 range; 1 + e is in [1, 2].
    root = tl.rsqrt(1.0 + e)
    large = root * root
    small = e * large
    return tl.where(logit < 0, small, large), tl.where(logit < 0, large, small), e

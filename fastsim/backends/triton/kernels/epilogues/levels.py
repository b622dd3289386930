"""CoSENT over a matrix.

A level is the set of all pairs with the same target. The state of level l is A_l = lse z and
B_l = lse -z, each as a maximum and a sum. The score gradient of a pair in level l is
up_l e^{scale (s - high_l)} - down_l e^{scale (-s - low_l)}. Here high_l and low_l are the maxima of
s and -s in the level. Every score belongs to one level. A loop over the levels selects the numbers
of its level, so that two exponentials for each score are enough.

levels: (the target values (K,), K, the numbers (4, K) of the levels, which an epilogue writes or
    reads).
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import (
    LOG2_E,
    weighted_share,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _largest(values):
    return tl.max(tl.max(values, 1), 0)


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def levels_forward(
    scores,
    target,
    is_positive,
    column,
    numbers,
    row_coefficients,
    column_coefficients,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    values, count, level_numbers = levels
    # A NaN compares false with LEFT_OUT, so it stays in its level.
    present = (scores <= LEFT_OUT) == 0
    high, low = scores, -scores
    for level in range(count):
        in_level = (target == tl.load(values + level)) & present
        top = _largest(tl.where(in_level, scores, LEFT_OUT))
        bottom = _largest(tl.where(in_level, -scores, LEFT_OUT))
        tl.store(level_numbers + level, top)
        tl.store(level_numbers + 2 * count + level, bottom)
        high, low = tl.where(in_level, top, high), tl.where(in_level, bottom, low)
    exponentials = tl.exp2((scale * LOG2_E) * (scores - high))
    negated_exponentials = tl.exp2((scale * LOG2_E) * (-scores - low))
    for level in range(count):
        in_level = (target == tl.load(values + level)) & present
        tl.store(level_numbers + count + level, _sum(tl.where(in_level, exponentials, 0.0)))
        negated_sum = _sum(tl.where(in_level, negated_exponentials, 0.0))
        tl.store(level_numbers + 3 * count + level, negated_sum)
    return (), (), ()


@triton.jit
def levels_score_grad(
    scores,
    target,
    is_positive,
    column,
    numbers,
    row_coefficients,
    column_coefficients,
    levels,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
):
    scale, _, _, _ = numbers
    values, count, level_numbers = levels
    present = (scores <= LEFT_OUT) == 0
    # All numbers of a pair that is left out are 0, since its level may have no pairs and then no
    # maxima.
    s = tl.where(present, scores, 0.0)
    high, up = tl.zeros_like(s), tl.zeros_like(s)
    low, down = tl.zeros_like(s), tl.zeros_like(s)
    for level in range(count):
        in_level = (target == tl.load(values + level)) & present
        high = tl.where(in_level, tl.load(level_numbers + level), high)
        up = tl.where(in_level, tl.load(level_numbers + count + level), up)
        low = tl.where(in_level, tl.load(level_numbers + 2 * count + level), low)
        down = tl.where(in_level, tl.load(level_numbers + 3 * count + level), down)
    return (), (), (weighted_share(s, scale, high, up) - weighted_share(-s, scale, low, down),)

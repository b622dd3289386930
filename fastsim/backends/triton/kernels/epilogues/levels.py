"""CoSENT over a matrix.

A level is the set of all pairs with the same target. The state of level l is A_l = lse z and
B_l = lse -z, each as a maximum and a sum. The score gradient of a pair in level l is
up_l e^{scale (s - high_l)} - down_l e^{scale (-s - low_l)}. Here high_l and low_l are the maxima of
s and -s in the level. Every score belongs to one level. A loop over the levels selects the numbers
of its level, so that two exponentials for each score are enough.

levels: (the target values (K,), K, the numbers (4, K) of the levels, which are written or read).
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
    present = (scores <= LEFT_OUT) == 0
    high, low = scores, -scores
    for level in range(size):
        in_level = (target == tl.load(values + level)) & present
        top = _largest(tl.where(in_level, scores, LEFT_OUT))
        bottom = _largest(tl.where(in_level, -scores, LEFT_OUT))
        tl.store(out + level, top)
        tl.store(out + 2 * size + level, bottom)
        high, low = tl.where(in_level, top, high), tl.where(in_level, bottom, low)
    rising = tl.exp2((scale * LOG2_E) * (scores - high))
    falling = tl.exp2((scale * LOG2_E) * (-scores - low))
    for level in range(size):
        in_level = (target == tl.load(values + level)) & present
        tl.store(out + size + level, tl.sum(tl.sum(tl.where(in_level, rising, 0.0), 1), 0))
        tl.store(out + 3 * size + level, tl.sum(tl.sum(tl.where(in_level, falling, 0.0), 1), 0))
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
    present = (scores <= LEFT_OUT) == 0
    # All numbers of a pair that is left out are 0, since its level may have no pairs and then no
    # maxima.
    s = tl.where(present, scores, 0.0)
    high, up = tl.zeros_like(s), tl.zeros_like(s)
    low, down = tl.zeros_like(s), tl.zeros_like(s)
    for level in range(size):
        in_level = (target == tl.load(values + level)) & present
        high = tl.where(in_level, tl.load(of_level + level), high)
        up = tl.where(in_level, tl.load(of_level + size + level), up)
        low = tl.where(in_level, tl.load(of_level + 2 * size + level), low)
        down = tl.where(in_level, tl.load(of_level + 3 * size + level), down)
    return (), (), (weighted_share(s, scale, high, up) - weighted_share(-s, scale, low, down),)

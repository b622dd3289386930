"""Running log-sum-exps of a list, from both ends at once, for CoSENT.

Row 0 runs forward over the logits, row 1 backward over the negated logits. There are three
launches. The first computes the total of each part of the list. The second computes the total of
all parts before each part. The third computes the running sums within each part and joins them with
the total before it. A sum is stored with the maximum that it is relative to, so logits of any
spread are safe. The order of additions is fixed, so that the result is the same every time.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _join(top, total, right_top, right_total):
    joined_top = tl.maximum(top, right_top)
    rescaled = right_total * tl.exp2((right_top - joined_top) * LOG2_E)
    total = tl.fma(total, tl.exp2((top - joined_top) * LOG2_E), rescaled)
    return joined_top, total


@triton.jit
def _load(logits_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    """(logits of this program's part, in the order of its row; their indices; whether they exist).

    In row 1 the logits are negated.
    """
    backward = tl.program_id(1)
    step = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.where(backward == 1, count - 1 - step, step)
    inside = step < count
    value = tl.load(logits_ptr + index, mask=inside, other=0.0)
    value = tl.where(backward == 1, -value, value)
    return tl.where(inside, value, LEFT_OUT), index, inside


@triton.jit(do_not_specialize=["count"])
def totals_kernel(logits_ptr, tops_ptr, sums_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the maximum and the sum of exponentials of each part, both (2, parts)."""
    value, _, inside = _load(logits_ptr, count, BLOCK)
    top = tl.max(value, 0)
    total = tl.sum(tl.where(inside, tl.exp2((value - top) * LOG2_E), 0.0), 0)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, total)


@triton.jit(do_not_specialize=["parts"])
def carries_kernel(tops_ptr, sums_ptr, carry_tops_ptr, carry_sums_ptr, parts, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the maximum and the sum of exponentials of all parts before each part, (2, parts).

    A program takes one row, BLOCK parts at a time.
    """
    first = tl.program_id(0) * parts
    top = tl.full((), LEFT_OUT, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        # The total before a part ends with the previous part. The scan adds up the previous parts
        # of this block; the total before the block is joined afterwards.
        has_previous = (part > start) & (part <= parts)
        tops = tl.load(tops_ptr + first + part - 1, mask=has_previous, other=LEFT_OUT)
        sums = tl.load(sums_ptr + first + part - 1, mask=has_previous, other=0.0)
        tops, sums = tl.associative_scan((tops, sums), 0, _join)
        tops, sums = _join(top, total, tops, sums)
        inside = part < parts
        tl.store(carry_tops_ptr + first + part, tops, mask=inside)
        tl.store(carry_sums_ptr + first + part, sums, mask=inside)
        # The total before the next block: that before the last part of this block, and this part.
        last = part - start == BLOCK - 1
        top = tl.max(tl.where(last, tops, LEFT_OUT), 0)
        total = tl.sum(tl.where(last, sums, 0.0), 0)
        end = start + BLOCK - 1
        last_top = tl.load(tops_ptr + first + end, mask=end < parts, other=LEFT_OUT)
        last_sum = tl.load(sums_ptr + first + end, mask=end < parts, other=0.0)
        top, total = _join(top, total, last_top, last_sum)


@triton.jit(do_not_specialize=["count"])
def scan_kernel(
    logits_ptr,
    tops_ptr,
    sums_ptr,
    out_top_ptr,
    out_sum_ptr,
    count,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Writes the maximum and the sum of exponentials up to and including each logit, (2, count)."""
    value, index, inside = _load(logits_ptr, count, BLOCK)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    top, total = tl.associative_scan((value, tl.where(inside, 1.0, 0.0)), 0, _join)
    top, total = _join(top, total, tl.load(tops_ptr + at), tl.load(sums_ptr + at))
    out = tl.program_id(1).to(tl.int64) * count + index
    tl.store(out_top_ptr + out, top, mask=inside)
    tl.store(out_sum_ptr + out, total, mask=inside)

"""Running log-sum-exps of a list from both ends at once, for CoSENT.

Row 0 runs forward over the logits, row 1 backward over their negatives. There are three launches:
the total of each part; the running totals of the parts; the running sums within each part, joined
with the total before it. A sum is kept with its maximum, so that any spread of logits is safe. The
order is fixed, so that the result is the same every time.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E
from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _join(top, total, other_top, other_total):
    both = tl.maximum(top, other_top)
    grown = other_total * tl.exp2((other_top - both) * LOG2_E)
    total = tl.fma(total, tl.exp2((top - both) * LOG2_E), grown)
    return both, total


@triton.jit
def _load(logits_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    """(logits of this part in the direction of its row, their places, whether they exist)."""
    backward = tl.program_id(1)
    step = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(backward == 1, count - 1 - step, step)
    inside = step < count
    value = tl.load(logits_ptr + place, mask=inside, other=0.0)
    value = tl.where(backward == 1, -value, value)
    return tl.where(inside, value, LEFT_OUT), place, inside


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
    """Writes maximum and sum of all parts before each part, (2, parts), BLOCK parts at a time."""
    first = tl.program_id(0) * parts
    top = tl.full((), LEFT_OUT, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        # The total before a part ends with the previous part.
        before = (part > start) & (part <= parts)
        tops = tl.load(tops_ptr + first + part - 1, mask=before, other=LEFT_OUT)
        sums = tl.load(sums_ptr + first + part - 1, mask=before, other=0.0)
        tops, sums = tl.associative_scan((tops, sums), 0, _join)
        tops, sums = _join(top, total, tops, sums)
        inside = part < parts
        tl.store(carry_tops_ptr + first + part, tops, mask=inside)
        tl.store(carry_sums_ptr + first + part, sums, mask=inside)
        # The total of these parts and of all before them.
        last = part - start == BLOCK - 1
        top = tl.max(tl.where(last, tops, LEFT_OUT), 0)
        total = tl.sum(tl.where(last, sums, 0.0), 0)
        end = start + BLOCK - 1
        held = tl.load(tops_ptr + first + end, mask=end < parts, other=LEFT_OUT)
        held_sum = tl.load(sums_ptr + first + end, mask=end < parts, other=0.0)
        top, total = _join(top, total, held, held_sum)


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
    """Writes maximum and sum of exponentials up to and including each place, both (2, count)."""
    value, place, inside = _load(logits_ptr, count, BLOCK)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    top, total = tl.associative_scan((value, tl.where(inside, 1.0, 0.0)), 0, _join)
    top, total = _join(top, total, tl.load(tops_ptr + at), tl.load(sums_ptr + at))
    out = tl.program_id(1).to(tl.int64) * count + place
    tl.store(out_top_ptr + out, top, mask=inside)
    tl.store(out_sum_ptr + out, total, mask=inside)

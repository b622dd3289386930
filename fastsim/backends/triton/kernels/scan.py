"""Running log-sum-exps of a list from both ends at once, for CoSENT.

Row 0 runs forward over the logits, row 1 backward over their negatives. Three launches: the total
of each part, a running total of those, then the parts with what lies before them. A sum is kept
with its maximum, so any spread of logits is safe; the order is fixed, so the result is too.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.pairs import LEFT_OUT


@triton.jit
def _join(top, total, other_top, other_total):
    both = tl.maximum(top, other_top)
    total = total * tl.exp(top - both) + other_total * tl.exp(other_top - both)
    return both, total


@triton.jit
def _load(logits_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    """The logits of this part in the direction of its row, their places, and which are there."""
    backward = tl.program_id(1)
    step = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(backward == 1, count - 1 - step, step)
    inside = step < count
    value = tl.load(logits_ptr + place, mask=inside, other=0.0)
    value = tl.where(backward == 1, -value, value)
    return tl.where(inside, value, LEFT_OUT), place, inside


@triton.jit(do_not_specialize=["count"])
def totals_kernel(logits_ptr, tops_ptr, sums_ptr, count, BLOCK: tl.constexpr):  # noqa: N803
    """(2, parts) maximum and sum of exponentials of each part."""
    value, _, inside = _load(logits_ptr, count, BLOCK)
    top = tl.max(value, 0)
    total = tl.sum(tl.where(inside, tl.exp(value - top), 0.0), 0)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, total)


@triton.jit(do_not_specialize=["parts"])
def carries_kernel(tops_ptr, sums_ptr, carry_tops_ptr, carry_sums_ptr, parts):
    """(2, parts) what lies before each part; one after the other, as a part holds thousands."""
    first = tl.program_id(0) * parts
    top = tl.full((), LEFT_OUT, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for part in range(0, parts):
        tl.store(carry_tops_ptr + first + part, top)
        tl.store(carry_sums_ptr + first + part, total)
        held = tl.load(tops_ptr + first + part), tl.load(sums_ptr + first + part)
        top, total = _join(top, total, held[0], held[1])


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
    """(2, count) maximum and sum of the exponentials up to and with each place."""
    value, place, inside = _load(logits_ptr, count, BLOCK)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    top, total = tl.associative_scan((value, tl.where(inside, 1.0, 0.0)), 0, _join)
    top, total = _join(top, total, tl.load(tops_ptr + at), tl.load(sums_ptr + at))
    out = tl.program_id(1).to(tl.int64) * count + place
    tl.store(out_top_ptr + out, top, mask=inside)
    tl.store(out_sum_ptr + out, total, mask=inside)

"""Merges the maxima and sums of exponentials of all tiles of a row or column, in a fixed order."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.epilogues.terms import LOG2_E
from fastsim.backends.triton.kernels.pairs import LEFT_OUT

# Arguments that are planes of one tensor. A plane may have any size.
PLANES = ["tops_ptr", "sums_ptr", "top_ptr", "sum_ptr"]


@triton.jit(do_not_specialize=["tiles", "count"], do_not_specialize_on_alignment=PLANES)
def merge_exponentials_kernel(
    tops_ptr,
    sums_ptr,
    top_ptr,
    sum_ptr,
    scale_ptr,
    tiles,
    count,
    ACCUMULATE: tl.constexpr,  # noqa: N803
    TILES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Merges maxima and sums of exponentials (tiles, count) into (count,).

    ACCUMULATE: whether the results already hold maxima and sums, which are merged too.
    """
    scale = tl.load(scale_ptr) * LOG2_E
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    if ACCUMULATE:
        top = tl.load(top_ptr + entry, mask=inside, other=LEFT_OUT)
        total = tl.load(sum_ptr + entry, mask=inside, other=0.0)
    else:
        top = tl.full((BLOCK,), LEFT_OUT, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = tile.to(tl.int64)[:, None] * count + entry[None, :]
        valid = (tile < tiles)[:, None] & inside[None, :]
        tops = tl.load(tops_ptr + at, mask=valid, other=LEFT_OUT)
        sums = tl.load(sums_ptr + at, mask=valid, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        added = tl.sum(sums * tl.exp2(scale * (tops - new_top[None, :])), 0)
        total = total * tl.exp2(scale * (top - new_top)) + added
        top = new_top
    tl.store(top_ptr + entry, top, mask=inside)
    tl.store(sum_ptr + entry, total, mask=inside)

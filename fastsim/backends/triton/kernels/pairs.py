"""Which pairs of a tile take part, and their targets: decided from indices, never from a mask.

`pairs` is what `Launch` passes of `fastsim.pairs.Pairs`, in its order: positives, row_ids,
column_ids, row_groups, column_groups, dense, its strides of rows and columns, offset. What a call
does not have is None and costs nothing.
"""

import triton
import triton.language as tl

from fastsim.kinds.kind import EMPTY

# The score of a pair that takes no part: far below every score, finite so that 0 * s stays 0.
LEFT_OUT = tl.constexpr(EMPTY)


@triton.jit
def own_pairs(row_at, column, pairs):
    """(BLOCK_M, BLOCK_N): whether the column is the row's positive."""
    positives, _, _, _, _, _, _, _, _ = pairs
    if positives is None:
        return tl.zeros((row_at.shape[0], column.shape[0]), tl.int1)
    else:  # compiled only where there are positives
        return column[None, :] == tl.load(positives + row_at)[:, None]


@triton.jit
def without_left_out(
    scores,
    row,
    column,
    row_at,
    column_at,
    row1,
    column1,
    pairs,
    SKIP: tl.constexpr,  # noqa: N803
):
    """The scores, LEFT_OUT where the pair is past an edge, skipped or excluded."""
    _, row_ids, column_ids, _, _, _, _, _, offset = pairs
    part = (row < row1)[:, None] & (column < column1)[None, :]
    if SKIP == "diagonal":
        part = part & (row[:, None] + offset != column[None, :])
    if SKIP == "lower":
        part = part & (column[None, :] > row[:, None] + offset)
    if row_ids is not None:
        same = tl.load(row_ids + row_at)[:, None] == tl.load(column_ids + column_at)[None, :]
        part = part & (own_pairs(row_at, column, pairs) | (same == 0))
    return tl.where(part, scores, LEFT_OUT)


@triton.jit
def all_take_part(
    top,
    left,
    row1,
    column1,
    pairs,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    SKIP: tl.constexpr,  # noqa: N803
):
    """Whether no pair of the ROWS x COLUMNS from (top, left) on has to be left out by its index."""
    _, _, _, _, _, _, _, _, offset = pairs
    whole = (top + ROWS <= row1) & (left + COLUMNS <= column1)
    if SKIP != "nothing":
        above = left > top + ROWS - 1 + offset
        if SKIP == "diagonal":
            above = above | (left + COLUMNS <= top + offset)
        whole = whole & above
    return whole


@triton.jit
def targets(row, column, row_at, column_at, whole, row1, column1, pairs, NEGATIVE: tl.constexpr):  # noqa: N803
    """(BLOCK_M, BLOCK_N) float32 targets; `whole`: no pair lies past an edge."""
    _, _, _, row_groups, column_groups, dense, dense_row, dense_column, _ = pairs
    if dense is not None:
        at = dense + row.to(tl.int64)[:, None] * dense_row
        at += column.to(tl.int64)[None, :] * dense_column
        # Without a mask several at a time are read.
        if whole:
            target = tl.load(at)
        else:
            inside = (row < row1)[:, None] & (column < column1)[None, :]
            target = tl.load(at, mask=inside, other=0)
        # Straight to float32: the caller's dtype may be one the interpreter cannot compute in.
        return target.to(tl.float32)
    elif row_groups is not None:
        same = tl.load(row_groups + row_at)[:, None] == tl.load(column_groups + column_at)[None, :]
        return tl.where(same, 1.0, NEGATIVE)
    else:
        return tl.where(own_pairs(row_at, column, pairs), 1.0, 0.0)


@triton.jit
def pairs_of(
    scores,
    row,
    column,
    row_at,
    column_at,
    whole,
    row1,
    column1,
    pairs,
    SKIP: tl.constexpr,  # noqa: N803
    NEGATIVE: tl.constexpr,  # noqa: N803
):
    """(scores, LEFT_OUT where a pair takes no part, targets, own pairs) of a tile."""
    _, row_ids, _, _, _, _, _, _, _ = pairs
    masked = whole == 0
    if row_ids is not None:
        masked = True
    if masked:
        scores = without_left_out(
            scores, row, column, row_at, column_at, row1, column1, pairs, SKIP
        )
    target = targets(row, column, row_at, column_at, whole, row1, column1, pairs, NEGATIVE)
    return scores, target, own_pairs(row_at, column, pairs)

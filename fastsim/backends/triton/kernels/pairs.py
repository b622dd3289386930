"""The pairs of a tile that are left out, and the targets of the others.

Both follow from indices of rows and columns, never from a mask.

`pairs` are the arguments of `tile_launches.pair_arguments`, in this order: positives, row_ids,
column_ids, row_groups, column_groups, dense, the strides of its rows and columns, offset. An
argument that a call does not need is None and costs nothing.
"""

import triton
import triton.language as tl

from fastsim.kinds.kind import EMPTY

# The score of a pair that is left out: far below every score, but finite, so that 0 * s stays 0.
LEFT_OUT = tl.constexpr(EMPTY)


@triton.jit
def positive_pairs(clamped_row, column, pairs):
    """For each pair of the tile, whether the column is the row's positive."""
    positives, _, _, _, _, _, _, _, _ = pairs
    if positives is None:
        return tl.zeros((clamped_row.shape[0], column.shape[0]), tl.int1)
    else:  # compiled only if there are positives
        return column[None, :] == tl.load(positives + clamped_row)[:, None]


@triton.jit
def mark_left_out(
    scores,
    row,
    column,
    clamped_row,
    clamped_column,
    row1,
    column1,
    pairs,
    SKIP: tl.constexpr,  # noqa: N803
):
    """The scores, with LEFT_OUT for pairs past an edge, skipped by SKIP, or left out by ids."""
    _, row_ids, column_ids, _, _, _, _, _, offset = pairs
    present = (row < row1)[:, None] & (column < column1)[None, :]
    if SKIP == "diagonal":
        present = present & (row[:, None] + offset != column[None, :])
    if SKIP == "lower":
        present = present & (column[None, :] > row[:, None] + offset)
    if row_ids is not None:
        same = (
            tl.load(row_ids + clamped_row)[:, None] == tl.load(column_ids + clamped_column)[None, :]
        )
        present = present & (positive_pairs(clamped_row, column, pairs) | (same == 0))
    return tl.where(present, scores, LEFT_OUT)


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
    """Whether no pair of the tile is past an edge or skipped.

    The tile has ROWS x COLUMNS pairs, the first of them (top, left).
    """
    _, _, _, _, _, _, _, _, offset = pairs
    whole = (top + ROWS <= row1) & (left + COLUMNS <= column1)
    if SKIP != "nothing":
        above = left > top + ROWS - 1 + offset
        if SKIP == "diagonal":
            above = above | (left + COLUMNS <= top + offset)
        whole = whole & above
    return whole


@triton.jit
def targets(
    row,
    column,
    clamped_row,
    clamped_column,
    whole,
    row1,
    column1,
    pairs,
    NEGATIVE: tl.constexpr,  # noqa: N803
):
    """The targets of the tile's pairs in float32. whole: whether no pair lies past an edge."""
    _, _, _, row_groups, column_groups, dense, dense_row, dense_column, _ = pairs
    if dense is not None:
        at = dense + row.to(tl.int64)[:, None] * dense_row
        at += column.to(tl.int64)[None, :] * dense_column
        # Without a mask, a load reads several targets at a time.
        if whole:
            target = tl.load(at)
        else:
            inside = (row < row1)[:, None] & (column < column1)[None, :]
            target = tl.load(at, mask=inside, other=0)
        # To float32 first: the interpreter may not compute in the dtype of the targets.
        return target.to(tl.float32)
    elif row_groups is not None:
        same = (
            tl.load(row_groups + clamped_row)[:, None]
            == tl.load(column_groups + clamped_column)[None, :]
        )
        return tl.where(same, 1.0, NEGATIVE)
    else:
        return tl.where(positive_pairs(clamped_row, column, pairs), 1.0, 0.0)


@triton.jit
def scores_and_targets(
    scores,
    row,
    column,
    clamped_row,
    clamped_column,
    whole,
    row1,
    column1,
    pairs,
    SKIP: tl.constexpr,  # noqa: N803
    NEGATIVE: tl.constexpr,  # noqa: N803
):
    """(scores, targets, whether the column is the row's positive) of the pairs of a tile.

    The scores of pairs that are left out are LEFT_OUT. whole: see `targets`.
    """
    _, row_ids, _, _, _, _, _, _, _ = pairs
    masked = whole == 0
    if row_ids is not None:
        masked = True
    if masked:
        scores = mark_left_out(
            scores, row, column, clamped_row, clamped_column, row1, column1, pairs, SKIP
        )
    target = targets(
        row, column, clamped_row, clamped_column, whole, row1, column1, pairs, NEGATIVE
    )
    return scores, target, positive_pairs(clamped_row, column, pairs)

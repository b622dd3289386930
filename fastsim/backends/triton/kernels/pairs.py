"""Which pairs of a tile take part, and their targets: decided from indices, never from a mask."""

import triton
import triton.language as tl

from fastsim.kinds.kind import EMPTY

# The score of a pair that takes no part: far below every cosine, finite so that 0 * s stays 0.
LEFT_OUT = tl.constexpr(EMPTY)


@triton.jit
def row_place(row, tile, block):
    """Where what a tile keeps of these rows lies in (columns of tiles, rows of the block)."""
    return tile[1].to(tl.int64) * (block.row1 - block.row0) + (row - block.row0)


@triton.jit
def own_pairs(row, column, block, pairs):
    """(BLOCK_M, BLOCK_N): whether the column is the row's positive."""
    if pairs.positives is None:
        return tl.zeros((row.shape[0], column.shape[0]), tl.int1)
    positive = tl.load(pairs.positives + row, mask=row < block.row1, other=-1)
    return column[None, :] == positive[:, None]


@triton.jit
def own_group(row, column, block, pairs):
    """(BLOCK_M, BLOCK_N): whether row and column are of one group."""
    row_group = tl.load(pairs.row_groups + row, mask=row < block.row1, other=0)
    column_group = tl.load(pairs.column_groups + column, mask=column < block.column1, other=0)
    return row_group[:, None] == column_group[None, :]


@triton.jit
def pair_mask(row, column, block, pairs, SKIP: tl.constexpr):  # noqa: N803
    """(BLOCK_M, BLOCK_N): inside the block, not skipped, not excluded."""
    in_rows, in_columns = row < block.row1, column < block.column1
    part = in_rows[:, None] & in_columns[None, :]
    if SKIP == "diagonal":
        part = part & (row[:, None] + pairs.offset != column[None, :])
    if SKIP == "lower":
        part = part & (column[None, :] > row[:, None] + pairs.offset)
    if pairs.row_ids is not None:
        row_id = tl.load(pairs.row_ids + row, mask=in_rows, other=0)
        column_id = tl.load(pairs.column_ids + column, mask=in_columns, other=0)
        same = row_id[:, None] == column_id[None, :]
        part = part & (own_pairs(row, column, block, pairs) | (same == 0))
    return part


@triton.jit
def targets(row, column, block, pairs):
    """(BLOCK_M, BLOCK_N) float32 targets."""
    in_rows, in_columns = row < block.row1, column < block.column1
    if pairs.dense is not None:
        at = row.to(tl.int64)[:, None] * pairs.dense_row
        at += column.to(tl.int64)[None, :] * pairs.dense_column
        inside = in_rows[:, None] & in_columns[None, :]
        # Straight to float32: the caller's dtype may be one the interpreter cannot compute in.
        target = tl.load(pairs.dense + at, mask=inside, other=0).to(tl.float32)
    elif pairs.row_groups is not None:
        target = tl.where(own_group(row, column, block, pairs), 1.0, pairs.negative_target)
    else:
        target = tl.where(own_pairs(row, column, block, pairs), 1.0, 0.0)
    return target

"""The tile kernel: a product of unit rows with the epilogues of a loss on its accumulator.

One source for both passes: FOLD writes what the loss keeps of the tile, SLOPE the tile of slopes,
either or both; they are compiled in. Nothing is added atomically: each tile has a place of its own.
"""

import triton
import triton.language as tl

from fastsim.backends.triton_kernels.pairs import LEFT_OUT, taking_part


@triton.jit
def _place(rows, columns, GROUP: tl.constexpr):  # noqa: N803
    """(row, column) of this program's tile; bands of GROUP rows share the columns in cache."""
    program = tl.program_id(0)
    in_band = GROUP * columns
    first = program // in_band * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = program % in_band
    return first + within % height, within // height


@triton.jit
def _product(
    x_ptr,
    y_ptr,
    x_row,
    y_row,
    depth,
    stride,
    PRECISION: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    """Scores of the rows of x and y; unit rows are padded with zeros to whole BLOCK_K."""
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + x_row.to(tl.int64)[:, None] * stride + k[None, :]
    y = y_ptr + y_row.to(tl.int64)[:, None] * stride + k[None, :]
    scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, depth, BLOCK_K):
        scores = tl.dot(tl.load(x), tl.load(y).T, scores, input_precision=PRECISION)
        x += BLOCK_K
        y += BLOCK_K
    return scores


@triton.jit(do_not_specialize=["block"])
def tile_kernel(
    x_ptr,
    y_ptr,
    stride,
    block,
    pairs,
    numbers,
    partials,
    slope,
    panel_ptr,
    panel_stride,
    SKIP: tl.constexpr,  # noqa: N803
    DIAGONAL: tl.constexpr,  # noqa: N803
    FOLD: tl.constexpr,  # noqa: N803
    SLOPE: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
):
    """x (N, stride), y (M, stride) unit rows; the panel (rows of the block, panel_stride).

    DIAGONAL: row i against the positive of row j, on the tiles of the diagonal only.
    """
    tile_rows = tl.cdiv(block.row1 - block.row0, BLOCK_M)
    tile_columns = tl.cdiv(block.column1 - block.column0, BLOCK_N)
    if DIAGONAL:
        tile_row = tl.program_id(0)
        row = block.row0 + tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block.row0 + tile_row * BLOCK_M + tl.arange(0, BLOCK_N)
        tile_column = tile_row
        y_row = tl.load(pairs.positives + column, mask=column < block.row1, other=0)
    else:
        tile_row, tile_column = _place(tile_rows, tile_columns, GROUP)
        row = block.row0 + tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block.column0 + tile_column * BLOCK_N + tl.arange(0, BLOCK_N)
        # Past the edge the last row again: loads need no mask, the epilogue drops the scores.
        y_row = tl.minimum(column, block.column1 - 1)
    depth = stride
    if SKIP == "lower":
        # A tile below the diagonal has no pair that takes part, so no product either.
        below = (
            block.column0 + (tile_column + 1) * BLOCK_N <= block.row0 + tile_row * BLOCK_M + 1
        )
        depth = tl.where(below, 0, stride)
    scores = _product(
        x_ptr,
        y_ptr,
        tl.minimum(row, block.row1 - 1),
        y_row,
        depth,
        stride,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if not DIAGONAL:
        # After the product: before it, a mask would fill the registers that the loop wants.
        scores = tl.where(taking_part(row, column, block, pairs, SKIP), scores, LEFT_OUT)
    if FOLD is not None:
        tile = (tile_row, tile_column, tile_columns)
        FOLD(scores, row, column, tile, block, pairs, numbers, partials)
    if SLOPE is not None:
        out = SLOPE(scores, row, column, block, pairs, numbers, slope)
        at = (row - block.row0).to(tl.int64)[:, None] * panel_stride
        at += (column - block.column0)[None, :]
        inside = (row < block.row1)[:, None] & (column < block.column1)[None, :]
        tl.store(panel_ptr + at, out.to(panel_ptr.dtype.element_ty), mask=inside)

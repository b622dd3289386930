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


@triton.jit
def _halves(scores):
    """The left and the right columns; they are different registers, so nothing moves."""
    split: tl.constexpr = (scores.shape[0], 2, scores.shape[1] // 2)
    return tl.split(tl.trans(tl.reshape(scores, split), (0, 2, 1)))


@triton.jit
def _quarters(scores):
    left, right = _halves(scores)
    return _halves(left) + _halves(right)


@triton.jit
def _epilogue(
    scores,
    row,
    first,
    tile,
    block,
    pairs,
    numbers,
    partials,
    slope,
    panel_ptr,
    panel_stride,
    SKIP: tl.constexpr,  # noqa: N803
    FOLD: tl.constexpr,  # noqa: N803
    SLOPE: tl.constexpr,  # noqa: N803
):
    """The epilogues on the columns of the tile from `first` on."""
    column = first + tl.arange(0, scores.shape[1])
    # Not before the product, whose loop wants the registers that a mask would fill.
    scores = tl.where(taking_part(row, column, block, pairs, SKIP), scores, LEFT_OUT)
    if SLOPE is not None:
        out = SLOPE(scores, row, column, block, pairs, numbers, slope)
        at = (row - block.row0).to(tl.int64)[:, None] * panel_stride
        at += (column - block.column0)[None, :]
        inside = (row < block.row1)[:, None] & (column < block.column1)[None, :]
        tl.store(panel_ptr + at, out.to(panel_ptr.dtype.element_ty), mask=inside)
    if FOLD is not None:
        FOLD(scores, row, column, tile, block, pairs, numbers, partials)


@triton.jit(do_not_specialize=["block"])
def tile_kernel(
    x_ptr,
    y_ptr,
    stride,
    block,
    pairs,
    guide,
    numbers,
    partials,
    slope,
    panel_ptr,
    panel_stride,
    SKIP: tl.constexpr,  # noqa: N803
    FOLD: tl.constexpr,  # noqa: N803
    SLOPE: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """x (N, stride), y (M, stride) unit rows; the panel (rows of the block, panel_stride).

    PARTS, 1, 2, 4 or 8: the epilogues take the tile in as many parts, each a tile of its own to
    them, so that what they compute with fits beside the accumulator.
    """
    tile_rows = tl.cdiv(block.row1 - block.row0, BLOCK_M)
    tile_columns = tl.cdiv(block.column1 - block.column0, BLOCK_N)
    tile_row, tile_column = _place(tile_rows, tile_columns, GROUP)
    row = block.row0 + tile_row * BLOCK_M + tl.arange(0, BLOCK_M)
    first = block.column0 + tile_column * BLOCK_N
    depth = stride
    if SKIP == "lower":
        # A tile below the diagonal has no pair that takes part, so no product either.
        diagonal = block.row0 + tile_row * BLOCK_M + pairs.offset
        depth = tl.where(first + BLOCK_N <= diagonal + 1, 0, stride)
    # Past the edge the last row again: loads need no mask, the epilogue drops the scores.
    x_row = tl.minimum(row, block.row1 - 1)
    y_row = tl.minimum(first + tl.arange(0, BLOCK_N), block.column1 - 1)
    if guide is not None:
        threshold = tl.load(guide.thresholds + x_row)[:, None]
        if guide.x_ptr is not None:
            # Before the scores, so that of this product only a bit of each pair stays alive.
            guided = _product(
                guide.x_ptr,
                guide.y_ptr,
                x_row,
                y_row,
                guide.stride,
                guide.stride,
                PRECISION,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            above = guided > threshold
    scores = _product(
        x_ptr, y_ptr, x_row, y_row, depth, stride, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if guide is not None:
        if guide.x_ptr is None:
            above = scores > threshold
        scores = tl.where(above, LEFT_OUT, scores)
    if PARTS == 1:
        parts = (scores,)
    elif PARTS == 2:
        parts = _halves(scores)
    elif PARTS == 4:
        parts = _quarters(scores)
    else:
        left, right = _halves(scores)
        parts = _quarters(left) + _quarters(right)
    for part in tl.static_range(PARTS):
        tile = (tile_row, tile_column * PARTS + part, tile_columns * PARTS)
        _epilogue(
            parts[part],
            row,
            first + part * (BLOCK_N // PARTS),
            tile,
            block,
            pairs,
            numbers,
            partials,
            slope,
            panel_ptr,
            panel_stride,
            SKIP,
            FOLD,
            SLOPE,
        )


@triton.jit(do_not_specialize=["rows"])
def positives_kernel(
    x_ptr,
    y_ptr,
    stride,
    positives_ptr,
    out_ptr,
    rows,
    PRECISION: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    """The score (rows,) of each row's positive, by the same products as the tiles."""
    start = tl.program_id(0) * BLOCK_M
    row, column = start + tl.arange(0, BLOCK_M), start + tl.arange(0, BLOCK_N)
    y_row = tl.load(positives_ptr + column, mask=column < rows, other=0)
    x_row = tl.minimum(row, rows - 1)
    scores = _product(
        x_ptr, y_ptr, x_row, y_row, stride, stride, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
    )
    value = tl.sum(tl.where(row[:, None] == column[None, :], scores, 0.0), 1)
    tl.store(out_ptr + row, value, mask=row < rows)

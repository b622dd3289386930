"""The tile kernel: a product of unit rows with the epilogues of a loss on its accumulator.

One source for both passes: FOLD writes what the loss keeps of the tile, SLOPE the tile of score
gradients, either or both; they are compiled in. Nothing is added atomically: each tile has a place
of its own.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.kept import keep, recall
from fastsim.backends.triton.kernels.pairs import LEFT_OUT, pair_mask, row_place


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
def _product(x, y, x_row, y_row, depth, stride, PRECISION: tl.constexpr, SIZES: tl.constexpr):  # noqa: N803
    """Scores of the rows of x and y by pointers; unit rows are padded to whole steps in depth."""
    rows: tl.constexpr = SIZES.rows
    columns: tl.constexpr = SIZES.columns
    k = tl.arange(0, SIZES.depth)
    x += x_row.to(tl.int64)[:, None] * stride + k[None, :]
    y += y_row.to(tl.int64)[:, None] * stride + k[None, :]
    scores = tl.zeros((rows, columns), tl.float32)
    for _ in range(0, depth, SIZES.depth):
        scores = tl.dot(tl.load(x), tl.load(y).T, scores, input_precision=PRECISION)
        x += SIZES.depth
        y += SIZES.depth
    return scores


@triton.jit
def _described_product(x, y, row, column, depth, PRECISION: tl.constexpr, SIZES: tl.constexpr):  # noqa: N803
    """The same by tensor descriptors, from the first row of x and of y on."""
    rows: tl.constexpr = SIZES.rows
    columns: tl.constexpr = SIZES.columns
    scores = tl.zeros((rows, columns), tl.float32)
    for k in range(0, depth, SIZES.depth):
        scores = tl.dot(x.load([row, k]), y.load([column, k]).T, scores, input_precision=PRECISION)
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
def _write_score_grads(scores, row, column, block, work, SCORE_GRAD: tl.constexpr):  # noqa: N803
    out = SCORE_GRAD(scores, row, column, block, work.pairs, work.numbers, work.coefficients)
    at = (row - block.row0).to(tl.int64)[:, None] * work.panel_stride
    at += (column - block.column0)[None, :]
    inside = (row < block.row1)[:, None] & (column < block.column1)[None, :]
    tl.store(work.panel + at, out.to(work.panel.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["block"])
def tile_kernel(
    x,
    y,
    stride,
    block,
    work,
    SKIP: tl.constexpr,  # noqa: N803
    FORWARD: tl.constexpr,  # noqa: N803
    SCORE_GRAD: tl.constexpr,  # noqa: N803
    MIRRORED: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    SIZES: tl.constexpr,  # noqa: N803
):
    """x (N, stride), y (M, stride) unit rows, pointers or descriptors of them.

    PARTS, 1, 2, 4 or 8: the epilogues take the tile in as many parts, each a tile of its own to
    them, so that what they compute with fits beside the accumulator.

    MIRRORED: x is y; see `_forward_mirrored`.
    """
    tile_rows = tl.cdiv(block.row1 - block.row0, SIZES.rows)
    tile_columns = tl.cdiv(block.column1 - block.column0, SIZES.columns)
    tile_row, tile_column = _place(tile_rows, tile_columns, SIZES.group)
    top = block.row0 + tile_row * SIZES.rows
    left = block.column0 + tile_column * SIZES.columns
    row = top + tl.arange(0, SIZES.rows)
    depth = stride
    if SKIP == "lower":
        # A tile below the diagonal has no pair that takes part, so no product either.
        diagonal = top + work.pairs.offset
        depth = tl.where(left + SIZES.columns <= diagonal + 1, 0, stride)
    if MIRRORED:
        depth = tl.where(left + SIZES.columns <= top, 0, stride)
    # Past the edge the last row again: loads need no mask, the epilogue drops the scores.
    x_row = tl.minimum(row, block.row1 - 1)
    y_row = tl.minimum(left + tl.arange(0, SIZES.columns), block.column1 - 1)
    guide = work.guide
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
                SIZES,
            )
            above = guided > threshold
    if SIZES.descriptors:
        scores = _described_product(x, y, top, left, depth, PRECISION, SIZES)
    else:
        scores = _product(x, y, x_row, y_row, depth, stride, PRECISION, SIZES)
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
        first, second = _halves(scores)
        parts = _quarters(first) + _quarters(second)
    width: tl.constexpr = SIZES.columns // PARTS
    for part in tl.static_range(PARTS):
        tile = (tile_row, tile_column * PARTS + part, tile_columns * PARTS)
        column = left + part * width + tl.arange(0, width)
        # Not before the product, whose loop wants the registers that a mask would fill.
        part_of = pair_mask(row, column, block, work.pairs, SKIP)
        scores = tl.where(part_of, parts[part], LEFT_OUT)
        if work.kept is not None:
            keep(scores, row, column, row_place(row, tile, block), block, work.kept)
        if SCORE_GRAD is not None:
            _write_score_grads(scores, row, column, block, work, SCORE_GRAD)
        if MIRRORED:
            _forward_mirrored(parts[part], scores, row, column, tile, block, work, SKIP, FORWARD)
        elif FORWARD is not None:
            FORWARD(scores, row, column, tile, block, work.pairs, work.numbers, work.partials)


@triton.jit
def _forward_mirrored(
    product,
    scores,
    row,
    column,
    tile,
    block,
    work,
    SKIP: tl.constexpr,  # noqa: N803
    FORWARD: tl.constexpr,  # noqa: N803
):
    """Forward reduction a tile of a symmetric matrix for its rows, and above the diagonal for its
    columns.

    Tiles are nested, so a pair is folded once: below the diagonal by the tile that mirrors it, or
    by its own where that reaches the diagonal.
    """
    pairs, numbers = work.pairs, work.numbers
    if tl.max(column, 0) >= tl.min(row, 0):
        FORWARD(scores, row, column, tile, block, pairs, numbers, work.partials)
    if tl.min(column, 0) > tl.max(row, 0):
        part = pair_mask(column, row, block, pairs, SKIP)
        mirrored = tl.where(part, tl.trans(product), LEFT_OUT)
        place = (tile[1], tile[2] + tile[0], tile[2])
        FORWARD(mirrored, column, row, place, block, pairs, numbers, work.partials)


@triton.jit(do_not_specialize=["block"])
def kept_score_grads_kernel(
    block,
    work,
    SCORE_GRAD: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Score gradients in the place of kept scores; COLUMNS is the width of the parts that kept
    them.
    """
    tile_columns = tl.cdiv(block.column1 - block.column0, COLUMNS)
    tile_row = tl.program_id(0) // tile_columns
    tile_column = tl.program_id(0) % tile_columns
    row = block.row0 + tile_row * ROWS + tl.arange(0, ROWS)
    column = block.column0 + tile_column * COLUMNS + tl.arange(0, COLUMNS)
    at = row_place(row, (tile_row, tile_column), block)
    scores = recall(row, column, at, block, work.kept)
    # Every thread has its codes before another writes score gradients over them.
    tl.debug_barrier()
    _write_score_grads(scores, row, column, block, work, SCORE_GRAD)


@triton.jit(do_not_specialize=["rows"])
def positives_kernel(
    x_ptr,
    y_ptr,
    stride,
    positives_ptr,
    out_ptr,
    rows,
    PRECISION: tl.constexpr,  # noqa: N803
    SIZES: tl.constexpr,  # noqa: N803
):
    """The score (rows,) of each row's positive, by the same products as the tiles."""
    start = tl.program_id(0) * SIZES.rows
    row, column = start + tl.arange(0, SIZES.rows), start + tl.arange(0, SIZES.columns)
    y_row = tl.load(positives_ptr + column, mask=column < rows, other=0)
    x_row = tl.minimum(row, rows - 1)
    scores = _product(x_ptr, y_ptr, x_row, y_row, stride, stride, PRECISION, SIZES)
    value = tl.sum(tl.where(row[:, None] == column[None, :], scores, 0.0), 1)
    tl.store(out_ptr + row, value, mask=row < rows)

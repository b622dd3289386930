"""The tile of a program, the product of its unit rows, and the parts of a tile of scores."""

import triton
import triton.language as tl


@triton.jit
def tile_of_program(rows, columns, GROUP: tl.constexpr):  # noqa: N803
    """(row, column) of this program's tile, counted in tiles.

    Programs take bands of GROUP rows of tiles, column by column, so that those that run at the same
    time share columns in the cache.
    """
    program = tl.program_id(0)
    tiles_of_band = GROUP * columns
    first_row = program // tiles_of_band * GROUP
    height = tl.minimum(rows - first_row, GROUP)
    band_index = program % tiles_of_band
    return first_row + band_index % height, band_index // height


@triton.jit
def product(x, y, x_row, y_row, steps, stride, PRECISION: tl.constexpr, SIZES: tl.constexpr):  # noqa: N803
    """Scores of rows of x and y, read by pointers. The rows are padded to whole steps in depth."""
    rows: tl.constexpr = SIZES.rows
    columns: tl.constexpr = SIZES.columns
    k = tl.arange(0, SIZES.depth)
    x += x_row.to(tl.int64)[:, None] * stride + k[None, :]
    y += y_row.to(tl.int64)[:, None] * stride + k[None, :]
    scores = tl.zeros((rows, columns), tl.float32)
    for _ in range(0, steps):
        scores = tl.dot(tl.load(x), tl.load(y).T, scores, input_precision=PRECISION)
        x += SIZES.depth
        y += SIZES.depth
    return scores


@triton.jit
def descriptor_product(x, y, row, column, steps, PRECISION: tl.constexpr, SIZES: tl.constexpr):  # noqa: N803
    """Scores of the rows of x from `row` on and of y from `column` on, read by descriptors."""
    rows: tl.constexpr = SIZES.rows
    columns: tl.constexpr = SIZES.columns
    scores = tl.zeros((rows, columns), tl.float32)
    for k in range(0, steps * SIZES.depth, SIZES.depth):
        scores = tl.dot(x.load([row, k]), y.load([column, k]).T, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _halves(scores):
    """(left half, right half) of the columns. They are in different registers, so nothing moves."""
    split: tl.constexpr = (scores.shape[0], 2, scores.shape[1] // 2)
    return tl.split(tl.trans(tl.reshape(scores, split), (0, 2, 1)))


@triton.jit
def _quarters(scores):
    left, right = _halves(scores)
    return _halves(left) + _halves(right)


@triton.jit
def split_columns(scores, WIDTH: tl.constexpr):  # noqa: N803
    """The scores in 1, 2, 4 or 8 parts of WIDTH columns, from left to right."""
    count: tl.constexpr = scores.shape[1] // WIDTH
    tl.static_assert(count <= 8)
    if count == 1:
        return (scores,)
    elif count == 2:
        return _halves(scores)
    elif count == 4:
        return _quarters(scores)
    else:
        left, right = _halves(scores)
        return _quarters(left) + _quarters(right)

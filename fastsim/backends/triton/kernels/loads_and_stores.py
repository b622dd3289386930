"""The loads and stores of a tile, except the loads of its operands."""

import triton
import triton.language as tl
from triton.language import core  # Triton 3.6 exports less of it in `tl`

from fastsim.backends.triton.kernels.table import PANEL_LINE

LINE = tl.constexpr(PANEL_LINE)

# Arguments of the tile kernels that are numbers which differ from batch to batch.
COUNTS = ["steps", "row0", "row1", "column0", "column1", "offset", "guide_steps"]
COUNTS += ["level_count", "panel_lines"]
# Arguments that are pointers to vectors. The caller may pass slices that begin at any element, and
# few of their elements are read.
VECTORS = ["positives", "row_ids", "column_ids", "row_groups", "column_groups", "thresholds"]
VECTORS += [
    "x_rest",
    "y_rest",
    "scale",
    "bias",
    "positive_scale",
    "levels",
    "level_numbers",
    "row_coefficients",
    "column_coefficients",
]


@triton.jit
def load_number(pointer):
    """The number at a pointer; 0 if it is None."""
    value = 0.0
    if pointer is not None:
        value = tl.load(pointer)
    return value


@triton.jit
def number_or_default(number, default):
    """`number`, or as float32 the number that it points to; `default` if it is None."""
    if number is None:
        return default
    else:
        value = core.to_tensor(number)  # in the interpreter it is still a Python number
        if value.dtype.is_ptr():
            return tl.load(value).to(tl.float32)
        else:
            return value


@triton.jit
def rest_factors(x_rest, y_rest, clamped_row, clamped_column):
    """The factor of each score of a tile: the rest of its row times the rest of its column."""
    return tl.load(x_rest + clamped_row)[:, None] * tl.load(y_rest + clamped_column)[None, :]


@triton.jit
def load_coefficients(index, planes, count, COUNT: tl.constexpr, AXIS: tl.constexpr):  # noqa: N803
    """COUNT vectors along an axis of the tile: the elements `index` of each plane (count,)."""
    vectors = ()
    for plane in tl.static_range(COUNT):
        vector = tl.load(planes + plane * count.to(tl.int64) + index)
        vectors = vectors + (tl.expand_dims(vector, AXIS),)  # noqa: RUF005 (Triton has no such display)
    return vectors


@triton.jit
def store_planes(out, values, count, offset, index, inside, COUNT: tl.constexpr):  # noqa: N803
    """Stores the first COUNT values, each in its plane of `count` elements, at offset + index."""
    for plane in tl.static_range(COUNT):
        tl.store(out + plane * count + offset + index, values[plane], mask=inside)


@triton.jit
def store_positives(scores, is_positive, row, row0, row1, first_column, positives, out):
    """Stores the score of each row with its positive, if the tile has the positive's column.

    first_column: the first column of the tile. A positive is in one tile, so one program writes the
        score of a row.
    """
    in_rows = row < row1
    positive = tl.load(positives + row, mask=in_rows, other=-1)
    in_tile = (positive >= first_column) & (positive < first_column + scores.shape[1]) & in_rows
    tl.store(out + row - row0, tl.sum(tl.where(is_positive, scores, 0.0), 1), mask=in_tile)


@triton.jit
def store_score_grads(score_grad, row, local, row0, row1, panel, panel_lines):
    """Stores the score gradients of a tile to the panel. local: the columns within the block."""
    stride = panel_lines * LINE
    index = (row - row0).to(tl.int64)[:, None] * stride + local[None, :]
    inside = (row < row1)[:, None] & (local < stride)[None, :]
    tl.store(panel + index, score_grad.to(panel.dtype.element_ty), mask=inside)

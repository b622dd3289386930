"""What a tile reads and writes beside its operands."""

import triton
import triton.language as tl
from triton.language import core  # of which Triton 3.6 shows less in `tl`

from fastsim.backends.triton.kernels.table import PANEL_LINE

LINE = tl.constexpr(PANEL_LINE)

# Of the arguments of the tile kernels: numbers that differ from batch to batch.
COUNTS = ["steps", "row0", "row1", "column0", "column1", "offset", "guide_steps"]
COUNTS += ["level_count", "panel_lines"]
# Their parts begin at any element, and few of them are read.
VECTORS = ["positives", "row_ids", "column_ids", "row_groups", "column_groups", "thresholds"]
VECTORS += [
    "x_rest",
    "y_rest",
    "scale",
    "bias",
    "positive_scale",
    "levels",
    "of_levels",
    "of_rows",
    "of_columns",
]


@triton.jit
def number(pointer):
    """What it points to; 0 for none."""
    value = 0.0
    if pointer is not None:
        value = tl.load(pointer)
    return value


@triton.jit
def number_or(number, none):
    """A number, or in float32 what it points to; `none` for None."""
    if number is None:
        return none
    else:
        given = core.to_tensor(number)  # which the interpreter has left a number
        if given.dtype.is_ptr():
            return tl.load(given).to(tl.float32)
        else:
            return given


@triton.jit
def rests(x_rest, y_rest, row_at, column_at):
    return tl.load(x_rest + row_at)[:, None] * tl.load(y_rest + column_at)[None, :]


@triton.jit
def coefficients(at, planes, count, COUNT: tl.constexpr, AXIS: tl.constexpr):  # noqa: N803
    """COUNT vectors of (COUNT, count) planes at these places, along the axis of a tile."""
    found = ()
    for plane in tl.static_range(COUNT):
        vector = tl.load(planes + plane * count.to(tl.int64) + at)
        found = found + (tl.expand_dims(vector, AXIS),)  # noqa: RUF005 (Triton has no such display)
    return found


@triton.jit
def store(out, values, count, place, at, inside, COUNT: tl.constexpr):  # noqa: N803
    """The first COUNT of the values, plane by plane of `count`, from `place` on."""
    for plane in tl.static_range(COUNT):
        tl.store(out + plane * count + place + at, values[plane], mask=inside)


@triton.jit
def store_positives(scores, own, row, row0, row1, begin, positives, out):
    """Each row's score with its positive, if that is among the columns from `begin` on.

    It is in one tile, so one program writes the row.
    """
    in_rows = row < row1
    positive = tl.load(positives + row, mask=in_rows, other=-1)
    here = (positive >= begin) & (positive < begin + scores.shape[1]) & in_rows
    tl.store(out + row - row0, tl.sum(tl.where(own, scores, 0.0), 1), mask=here)


@triton.jit
def store_score_grads(out, row, local, row0, row1, panel, panel_lines):
    stride = panel_lines * LINE
    at = (row - row0).to(tl.int64)[:, None] * stride + local[None, :]
    inside = (row < row1)[:, None] & (local < stride)[None, :]
    tl.store(panel + at, out.to(panel.dtype.element_ty), mask=inside)

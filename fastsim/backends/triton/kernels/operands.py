"""The operands of products: unit rows, rows scaled by powers of two, rows padded to lines."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fastsim.backends import half_rows
from fastsim.backends.half_rows import ScaledRows
from fastsim.backends.triton.kernels.launching import cdiv, launch
from fastsim.backends.triton.kernels.rows import unit_rows_backward_kernel, unit_rows_kernel
from fastsim.backends.triton.kernels.table import LINE, architecture, operand_kind


def tile_rows(x):
    """(unit rows, inverse norms); the unit rows of 16-bit inputs are `ScaledRows`."""
    if x.dtype.itemsize != 2:
        return unit_rows(x, None)
    rest = x.new_empty(x.shape[0], dtype=torch.float32)
    values, inverse = unit_rows(x, None, rest)
    return ScaledRows(values, rest), inverse


def dot_rows(x):
    """`half_rows.dot_rows` for bfloat16 x, padded to whole lines."""
    rows, size = half_rows.dot_rows(x, padded)
    if architecture(x.device) == "interpreter":  # for bfloat16 it would multiply the bits
        rows.values = padded(x, torch.float32, LINE // x.itemsize)
    return rows, size


def unit_rows(x, dtype, rest=None):
    """(unit rows, inverse norms) of x (N, D).

    dtype: the dtype of the unit rows. If it is None, they are operands, in the operands' dtype and
        padded to lines.
    rest: (N,) receives `ScaledRows.rest`. The rows are then scaled by powers of two. It may be
        None.
    """
    rows, depth = x.shape
    operand = dtype or operand_dtype(x.dtype)
    step = LINE // operand.itemsize
    width = depth if dtype else cdiv(depth, step) * step
    unit = x.new_empty(rows, width, dtype=operand)
    inverse = x.new_empty(rows, dtype=torch.float32)
    band, chunk = row_sizes(width)
    launch(
        unit_rows_kernel,
        (cdiv(rows, band),),
        x.device,
        x,
        *x.stride(),
        unit,
        inverse,
        rest,
        rows,
        depth,
        width,
        TF32=dtype is None and operand_kind(x.dtype, architecture(x.device)) == "tf32",
        TINY=torch.finfo(torch.float32).tiny,
        ROWS=band,
        BLOCK=chunk,
        num_warps=4,
    )
    return unit[:, :depth], inverse


def unit_rows_backward(grad_unit, x, inverse, factor, dtype, *, scaled=False):
    """(factor * dL/dx in `dtype`, unit . grad_unit (N,)).

    scaled: whether `grad_unit` is the gradient of `ScaledRows`.
    """
    rows, depth = x.shape
    # The interpreter truncates float32 to bfloat16 instead of rounding it.
    grad_dtype = torch.float32 if architecture(x.device) == "interpreter" else dtype
    grad, dots = x.new_empty(x.shape, dtype=grad_dtype), torch.empty_like(inverse)
    band, chunk = row_sizes(depth)
    launch(
        unit_rows_backward_kernel,
        (cdiv(rows, band),),
        x.device,
        grad_unit,
        x,
        *x.stride(),
        inverse,
        factor.to(inverse.dtype),
        grad,
        dots,
        rows,
        depth,
        SCALED=scaled,
        ROWS=band,
        BLOCK=chunk,
        num_warps=4,
    )
    return grad.to(dtype), dots


def operand(unit, dtype):
    """Unit rows in the compute type -> operands for inputs of `dtype`, padded to whole lines."""
    to_round = operand_kind(dtype, architecture(unit.device)) == "tf32"
    return padded(to_tf32(unit) if to_round else unit, operand_dtype(dtype))


def padded(rows, dtype=None, step=None):
    """A copy of rows (N, D) in `dtype`, padded with zeros to whole steps of elements.

    step: by default the elements of a line.
    """
    dtype, depth = dtype or rows.dtype, rows.shape[1]
    step = step or LINE // dtype.itemsize
    out = rows.new_zeros(rows.shape[0], cdiv(depth, step) * step, dtype=dtype)
    out[:, :depth] = rows
    return out[:, :depth]


def to_tf32(rows):
    """float32 rows rounded to 11 significant bits, as `kernels.rows.to_tf32`."""
    nearest = (rows.contiguous().view(torch.int32) + 0x1000).bitwise_and_(-0x2000)
    return torch.where(rows.isnan(), rows, nearest.view(torch.float32))


def operand_dtype(dtype):
    """float16 for 16-bit inputs: unit rows never overflow, and bfloat16 would be less exact."""
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def row_sizes(width):
    """(rows, columns) that a program of a row kernel reads at a time."""
    chunk = min(1024, 1 << (width - 1).bit_length())
    return max(1, 2048 // chunk), chunk


def tile_descriptor(unit, rows, depth):
    """A descriptor of padded unit rows that loads tiles (rows, depth), with 0 past the last row."""
    shape = [unit.shape[0], unit.stride(0)]
    return TensorDescriptor(unit, shape, [unit.stride(0), 1], [rows, depth])

"""Row normalisation, forward and backward: a band of rows per program, any width, any strides."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def unit_rows_kernel(
    x_ptr,
    row_stride,
    column_stride,
    unit_ptr,
    inverse_ptr,
    rows,
    depth,
    width,
    TINY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """x (N, depth) -> x / |x| in (N, width), zeros past depth, and 1 / |x|.

    A row shorter than TINY, the smallest normal number, gives zeros and inverse norm 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < rows)[:, None]
    x = x_ptr + row.to(tl.int64)[:, None] * row_stride
    # In float64: the squares of float32 numbers pass its range.
    square = tl.zeros((ROWS,), tl.float64)
    for start in range(0, depth, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        value = value.to(tl.float32).to(tl.float64)
        square += tl.sum(value * value, 1)
    norm = tl.sqrt(square)
    none = norm < TINY
    inverse = tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, norm)).to(tl.float32)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    unit = unit_ptr + row.to(tl.int64)[:, None] * width
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        value = value.to(tl.float32) * inverse[:, None]
        inside = in_rows & (k < width)[None, :]
        tl.store(unit + k[None, :], value.to(unit_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def unit_rows_backward_kernel(
    grad_unit_ptr,
    x_ptr,
    row_stride,
    column_stride,
    inverse_ptr,
    factor_ptr,
    grad_ptr,
    dots_ptr,
    rows,
    depth,
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """dx = factor r (g - (u . g) u) for g = dL/du, u = r x; `dots` keeps u . g."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = (row < rows)[:, None]
    x = x_ptr + row.to(tl.int64)[:, None] * row_stride
    flat = row.to(tl.int64)[:, None] * depth
    inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)
    dot = tl.zeros((ROWS,), tl.float64)
    for start in range(0, depth, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        grad = tl.load(grad_unit_ptr + flat + k[None, :], mask=inside, other=0.0)
        dot += tl.sum(value.to(tl.float32).to(tl.float64) * grad.to(tl.float64), 1)
    along = (dot * inverse).to(tl.float32)
    tl.store(dots_ptr + row, along, mask=row < rows)
    outer = (tl.load(factor_ptr) * inverse)[:, None]
    pull = (along * inverse)[:, None]
    for start in range(0, depth, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        grad = tl.load(grad_unit_ptr + flat + k[None, :], mask=inside, other=0.0)
        out = outer * (grad - pull * value.to(tl.float32))
        tl.store(grad_ptr + flat + k[None, :], out.to(grad_ptr.dtype.element_ty), mask=inside)

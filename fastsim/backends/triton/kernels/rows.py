"""Row normalisation, forward and backward: a program takes some rows, of any width and strides."""

import triton
import triton.language as tl


@triton.jit
def rest_of(inverse):
    """The rest r in [0.5, 1) of an inverse norm r 2^e, e an integer; 0 if the inverse norm is 0."""
    bits = inverse.to(tl.int32, bitcast=True)
    rest = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    return tl.where(inverse > 0, rest, inverse)


@triton.jit
def to_tf32(value):
    """The nearest number with 11 significant bits; TF32 tensor cores ignore the other bits."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(value == value, nearest, value)


@triton.jit(do_not_specialize=["rows"])
def unit_rows_kernel(
    x_ptr,
    row_stride,
    column_stride,
    unit_ptr,
    inverse_ptr,
    rest_ptr,
    rows,
    depth,
    width,
    TF32: tl.constexpr,  # noqa: N803
    TINY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Writes the unit rows (N, width) of x (N, depth), zeros past depth, and 1 / |x| (N,).

    rest_ptr: (N,) receives the rest r of 1 / |x| = r 2^e. The rows are then written as 2^e x. It
        may be None.
    TF32: whether the rows are rounded to TF32.
    TINY: the smallest normal number. A row with a smaller norm gives zeros, inverse norm 0 and
        rest 0.
    """
    unit_rows(
        tl.program_id(0),
        x_ptr,
        row_stride,
        column_stride,
        unit_ptr,
        inverse_ptr,
        rest_ptr,
        rows,
        depth,
        width,
        rest_ptr is not None,
        TF32,
        TINY,
        ROWS,
        BLOCK,
    )


@triton.jit
def unit_rows(
    program,
    x_ptr,
    row_stride,
    column_stride,
    unit_ptr,
    inverse_ptr,
    rest_ptr,
    rows,
    depth,
    width,
    SCALED: tl.constexpr,  # noqa: N803
    TF32: tl.constexpr,  # noqa: N803
    TINY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = program * ROWS + tl.arange(0, ROWS)
    in_rows = (row < rows)[:, None]
    x = x_ptr + row.to(tl.int64)[:, None] * row_stride
    # In float64: squares of float32 numbers may exceed the range of float32.
    square_sum = tl.zeros((ROWS,), tl.float64)
    for start in range(0, depth, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        value = value.to(tl.float32).to(tl.float64)
        square_sum += tl.sum(value * value, 1)
    norm = tl.sqrt(square_sum)
    zero = norm < TINY
    inverse = tl.where(zero, 0.0, 1.0 / tl.where(zero, 1.0, norm)).to(tl.float32)
    tl.store(inverse_ptr + row, inverse, mask=row < rows)
    factor = inverse
    if SCALED:
        rest = rest_of(inverse)
        if rest_ptr is not None:
            tl.store(rest_ptr + row, rest, mask=row < rows)
        # The quotient is a power of two, and exact.
        factor = tl.where(inverse > 0, inverse / tl.where(inverse > 0, rest, 1.0), inverse)
    unit = unit_ptr + row.to(tl.int64)[:, None] * width
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        value = value.to(tl.float32) * factor[:, None]
        if TF32:
            value = to_tf32(value)
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
    SCALED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Writes dx = factor (g - (u . g) u) / |x|, where u = x / |x| and g = dL/du.

    dots_ptr: (N,) receives u . g.
    SCALED: whether the gradients that are read are g times the rest of 1 / |x| (`ScaledRows`).
    """
    unit_rows_backward(
        tl.program_id(0),
        grad_unit_ptr,
        depth,
        x_ptr,
        row_stride,
        column_stride,
        inverse_ptr,
        tl.load(factor_ptr),
        grad_ptr,
        dots_ptr,
        rows,
        depth,
        SCALED,
        ROWS,
        BLOCK,
    )


@triton.jit
def unit_rows_backward(
    program,
    grad_unit_ptr,
    grad_width,
    x_ptr,
    row_stride,
    column_stride,
    inverse_ptr,
    factor,
    grad_ptr,
    dots_ptr,
    rows,
    depth,
    SCALED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = program * ROWS + tl.arange(0, ROWS)
    in_rows = (row < rows)[:, None]
    x = x_ptr + row.to(tl.int64)[:, None] * row_stride
    flat = row.to(tl.int64)[:, None] * depth
    grad_unit = grad_unit_ptr + row.to(tl.int64)[:, None] * grad_width
    inverse = tl.load(inverse_ptr + row, mask=row < rows, other=0.0)
    rest_inverse = tl.full((ROWS,), 1.0, tl.float32)
    if SCALED:
        rest_inverse = 1.0 / tl.where(inverse > 0, rest_of(inverse), 1.0)
    dot = tl.zeros((ROWS,), tl.float64)
    for start in range(0, depth, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        grad = tl.load(grad_unit + k[None, :], mask=inside, other=0.0)
        dot += tl.sum(value.to(tl.float32).to(tl.float64) * grad.to(tl.float64), 1)
    unit_dot = (dot * (inverse * rest_inverse)).to(tl.float32)
    if dots_ptr is not None:
        tl.store(dots_ptr + row, unit_dot, mask=row < rows)
    row_factor = (factor * inverse)[:, None]
    unit_factor = (unit_dot * inverse)[:, None]
    for start in range(0, depth, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = in_rows & (k < depth)[None, :]
        value = tl.load(x + k.to(tl.int64)[None, :] * column_stride, mask=inside, other=0.0)
        grad = tl.load(grad_unit + k[None, :], mask=inside, other=0.0)
        out = row_factor * (grad * rest_inverse[:, None] - unit_factor * value.to(tl.float32))
        tl.store(grad_ptr + flat + k[None, :], out.to(grad_ptr.dtype.element_ty), mask=inside)

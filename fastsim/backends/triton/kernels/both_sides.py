"""The kernels of rows.py over both sides of a small batch in one launch."""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.loads_and_stores import number_or_default
from fastsim.backends.triton.kernels.rows import unit_rows, unit_rows_backward


@triton.jit(do_not_specialize=["rows", "columns"])
def unit_rows_of_both_kernel(
    x_ptr,
    x_row_stride,
    x_column_stride,
    y_ptr,
    y_row_stride,
    y_column_stride,
    unit_x_ptr,
    unit_y_ptr,
    inverse_ptr,
    rows,
    columns,
    depth,
    width,
    SCALED: tl.constexpr,  # noqa: N803
    TINY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Does what `unit_rows_kernel` does, for x (N, depth), and for y (M, depth) unless it is None.

    inverse_ptr: (N + M,) receives the inverse norms of both.
    SCALED: whether the rows are scaled by powers of two only. The rest of 1 / |x| is not stored,
        because it follows from the inverse norm.
    """
    program = tl.program_id(0)
    programs_of_x = tl.cdiv(rows, ROWS)
    if program < programs_of_x:
        unit_rows(
            program,
            x_ptr,
            x_row_stride,
            x_column_stride,
            unit_x_ptr,
            inverse_ptr,
            None,
            rows,
            depth,
            width,
            SCALED,
            False,  # the library rounds to TF32 itself
            TINY,
            ROWS,
            BLOCK,
        )
    elif y_ptr is not None:
        unit_rows(
            program - programs_of_x,
            y_ptr,
            y_row_stride,
            y_column_stride,
            unit_y_ptr,
            inverse_ptr + rows,
            None,
            columns,
            depth,
            width,
            SCALED,
            False,  # the library rounds to TF32 itself
            TINY,
            ROWS,
            BLOCK,
        )


@triton.jit(do_not_specialize=["rows", "columns"])
def unit_rows_of_both_backward_kernel(
    grad_unit_x_ptr,
    grad_unit_y_ptr,
    width,
    x_ptr,
    x_row_stride,
    x_column_stride,
    y_ptr,
    y_row_stride,
    y_column_stride,
    inverse_ptr,
    grad_ptr,
    scale,
    weight,
    grad_x_ptr,
    grad_y_ptr,
    rows,
    columns,
    depth,
    GAIN: tl.constexpr,  # noqa: N803
    SCALED: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Does what `unit_rows_backward_kernel` does, from gradients (N, width) and (M, width).

    Both gradients are multiplied by grad * scale * weight / GAIN. Each of the first three factors
    may be a number, a pointer to a number, or None for 1. A side is skipped if the memory for its
    gradient is None.
    """
    factor = number_or_default(scale, 1.0) * number_or_default(weight, 1.0) * (1.0 / GAIN)
    factor *= number_or_default(grad_ptr, 1.0)
    program = tl.program_id(0)
    programs_of_x = 0
    if grad_x_ptr is not None:
        programs_of_x = tl.cdiv(rows, ROWS)
        if program < programs_of_x:
            unit_rows_backward(
                program,
                grad_unit_x_ptr,
                width,
                x_ptr,
                x_row_stride,
                x_column_stride,
                inverse_ptr,
                factor,
                grad_x_ptr,
                None,
                rows,
                depth,
                SCALED,
                ROWS,
                BLOCK,
            )
    if grad_y_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
        if program >= programs_of_x:
            unit_rows_backward(
                program - programs_of_x,
                grad_unit_y_ptr,
                width,
                y_ptr,
                y_row_stride,
                y_column_stride,
                inverse_ptr + rows,
                factor,
                grad_y_ptr,
                None,
                columns,
                depth,
                SCALED,
                ROWS,
                BLOCK,
            )

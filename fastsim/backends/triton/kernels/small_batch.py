"""The allocations and launches of a small batch (fastsim/backends/triton/small_batch.py).

Such a batch spends most of its time on the host. So every tensor is one allocation, no tensor is
sliced, and the two sides share a launch.
"""

from typing import NamedTuple

import torch

from fastsim.backends.triton.kernels.both_sides import (
    unit_rows_of_both_backward_kernel,
    unit_rows_of_both_kernel,
)
from fastsim.backends.triton.kernels.epilogues import whole as row_losses
from fastsim.backends.triton.kernels.launching import cdiv, launch
from fastsim.backends.triton.kernels.operands import operand_dtype, row_sizes
from fastsim.backends.triton.kernels.table import LINE, architecture
from fastsim.backends.triton.kernels.whole import whole_columns_kernel, whole_kernel

TINY = torch.finfo(torch.float32).tiny
# So few that even a small batch has programs for all multiprocessors.
SCORES_PER_PROGRAM = 1024
# 8 scores of a thread, so few that there are registers for 32 warps.
SCORES_PER_WARP = 256
# A program has at most 1,024 threads. A warp has 64 threads on AMD.
MOST_WARPS, MOST_WARPS_AMD = 32, 16
# The rows and columns of a tile of `whole_columns_kernel`.
STATE_ROWS, STATE_COLUMNS = 128, 32
FEWEST_COLUMNS = 16  # columns of a tile of `whole_kernel`, at least
LOSSES = {
    "softmax": (row_losses.softmax, False),
    "sigmoid": (row_losses.sigmoid, False),
    "hard_triplet": (row_losses.triplet, False),
    "semi-hard_triplet": (row_losses.triplet, True),
}


class Sides(NamedTuple):
    """Unit rows of both sides, scaled by powers of two for 16-bit inputs, and their inverse norms.

    unit_x, unit_y: (N, width) and (M, width); unit_y is unit_x if x is compared with itself.
    inverse: (N + M,), or (N,) if x is compared with itself.
    """

    unit_x: torch.Tensor
    unit_y: torch.Tensor
    inverse: torch.Tensor


def unit_sides(x, y):
    """The `Sides` of x (N, D) and y (M, D), padded to whole lines.

    y: None if x is compared with itself.
    """
    (rows, depth), columns = x.shape, 0 if y is None else y.shape[0]
    dtype = operand_dtype(x.dtype)
    step = LINE // dtype.itemsize
    width = cdiv(depth, step) * step
    unit_x = x.new_empty((rows, width), dtype=dtype)
    unit_y = unit_x if y is None else x.new_empty((columns, width), dtype=dtype)
    inverse = x.new_empty(rows + columns, dtype=torch.float32)
    band, chunk = row_sizes(width)
    y_arguments = (None, 0, 0) if y is None else (y, *y.stride())
    launch(
        unit_rows_of_both_kernel,
        (cdiv(rows, band) + cdiv(columns, band),),
        x.device,
        x,
        *x.stride(),
        *y_arguments,
        unit_x,
        unit_y,
        inverse,
        rows,
        columns,
        depth,
        width,
        SCALED=x.dtype.itemsize == 2,
        TINY=TINY,
        ROWS=band,
        BLOCK=chunk,
        num_warps=4,
    )
    return Sides(unit_x, unit_y, inverse)


def losses(tile, operands, products, panel, outputs, numbers, gain):
    """Writes losses and score gradients from the products (N, M) float32 of the `Sides`.

    panel: (N, stride) receives `gain` times dL_i/dlogit_ij. It may be None.
    outputs: float64 tensors (losses (N,), sums (2, N) or None). They receive the losses, and
        dL/dscale and dL/dbias of each row, all times the weight.
    numbers: scale, bias, weight.
    """
    rows, columns = products.shape
    pairs, device = tile.pairs, products.device
    loss, flag = LOSSES[tile.kind]
    scale, bias, weight = numbers
    common = {
        "SCALED": operands.unit_x.dtype != torch.float32,
        "SELF_SIMILARITY": operands.unit_y is operands.unit_x,
    }
    indices = pairs.tensors()[:-1]
    margin = float(tile.margin) if tile.margin or loss is row_losses.triplet else None
    column_state = None
    if tile.symmetric:
        column_state = products.new_empty((3, columns))
        launch(
            whole_columns_kernel,
            (cdiv(columns, STATE_COLUMNS),),
            device,
            products,
            operands.inverse,
            column_state,
            *indices[:3],
            scale,
            margin,
            rows,
            columns,
            ROWS=STATE_ROWS,
            COLUMNS=STATE_COLUMNS,
            num_warps=8,
            **common,
        )
    padded_columns = 1 << (columns - 1).bit_length()
    band = max(1, SCORES_PER_PROGRAM // padded_columns)
    launch(
        whole_kernel,
        (cdiv(rows, band),),
        device,
        products,
        operands.inverse,
        panel,
        *outputs,
        column_state,
        *indices,
        scale,
        bias,
        margin,
        weight,
        rows,
        columns,
        0 if panel is None else panel.stride(0),
        EPILOGUE=loss,
        FLAG=flag,
        SKIP=pairs.skip,
        NEGATIVE=float(pairs.negative_target),
        GAIN=gain,
        ROWS=band,
        COLUMNS=max(FEWEST_COLUMNS, padded_columns),
        num_warps=max(4, min(padded_columns // SCORES_PER_WARP, _most_warps(device))),
        **common,
    )


def _most_warps(device):
    return MOST_WARPS_AMD if architecture(device).startswith("gfx") else MOST_WARPS


def rows_backward(grad, unit_grads, operands, x, y, scale, weight, gain, needs_grad, dtype):
    """(dL/dx, dL/dy) in `dtype`. A gradient that is not needed is None.

    unit_grads: the products of the panel with the `Sides`, which are not yet divided by `gain`.
    """
    (rows, depth), columns = x.shape, 0 if y is None else y.shape[0]
    # The interpreter truncates float32 to bfloat16 instead of rounding it.
    if architecture(x.device) == "interpreter":
        dtype = torch.float32
    grad_x = x.new_empty(x.shape, dtype=dtype) if needs_grad[0] else None
    grad_y = x.new_empty(y.shape, dtype=dtype) if needs_grad[1] else None
    band, chunk = row_sizes(depth)
    programs = cdiv(rows, band) * needs_grad[0] + cdiv(columns, band) * needs_grad[1]
    y_arguments = (None, 0, 0) if y is None else (y, *y.stride())
    launch(
        unit_rows_of_both_backward_kernel,
        (programs,),
        x.device,
        *unit_grads,
        operands.unit_x.shape[1],
        x,
        *x.stride(),
        *y_arguments,
        operands.inverse,
        grad,
        scale,
        weight,
        grad_x,
        grad_y,
        rows,
        columns,
        depth,
        GAIN=gain,
        SCALED=operands.unit_x.dtype != torch.float32,
        ROWS=band,
        BLOCK=chunk,
        num_warps=4,
    )
    return grad_x, grad_y

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
from fastsim.backends.triton.kernels.epilogues import whole as losses_of
from fastsim.backends.triton.kernels.launching import cdiv, launch
from fastsim.backends.triton.kernels.operands import operand_dtype, row_sizes
from fastsim.backends.triton.kernels.table import LINE, architecture
from fastsim.backends.triton.kernels.whole import whole_columns_kernel, whole_kernel

TINY = torch.finfo(torch.float32).tiny
SCORES = 1024  # of a program: so few that even a small batch has programs for all multiprocessors
OF_WARP = 256  # scores of a warp, 8 of a thread: so few that there are registers for 32 warps
MOST_WARPS, OF_AMD = 32, 16  # warps of a program at most: 1,024 threads, 64 a warp on AMD
TALL, BAND = 128, 32  # rows and columns of a tile of `whole_columns_kernel`
SMALLEST = 16  # columns of a tile
LOSSES = {
    "softmax": (losses_of.softmax, False),
    "sigmoid": (losses_of.sigmoid, False),
    "hard_triplet": (losses_of.triplet, False),
    "semi-hard_triplet": (losses_of.triplet, True),
}


class Sides(NamedTuple):
    """Unit rows of both sides, scaled by powers of two for 16-bit inputs, and their inverse norms.

    unit_y: unit_x itself if x is compared with itself. inverse: (N + M,).
    """

    unit_x: torch.Tensor
    unit_y: torch.Tensor
    inverse: torch.Tensor


def rows_of(x, y):
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


def losses(tile, operands, products, panel, of_rows, numbers, gain):
    """Writes losses and score gradients from the products (N, M) float32 of the `Sides`.

    panel: (N, stride) receives `gain` times dL_i/dlogit_ij; or None.
    of_rows: float64 tensors (losses (N,), sums (2, N) or None). They receive the losses, and
        dL/dscale and dL/dbias of each row, all times the weight.
    numbers: scale, bias, weight.
    """
    rows, columns = products.shape
    pairs, device = tile.pairs, products.device
    loss, flag = LOSSES[tile.kind]
    scale, bias, weight = numbers
    shared = {
        "SCALED": operands.unit_x.dtype != torch.float32,
        "TOGETHER": operands.unit_y is operands.unit_x,
    }
    indices = pairs.tensors()[:-1]
    margin = float(tile.margin) if tile.margin or loss is losses_of.triplet else None
    of_columns = None
    if tile.symmetric:
        of_columns = products.new_empty((3, columns))
        launch(
            whole_columns_kernel,
            (cdiv(columns, BAND),),
            device,
            products,
            operands.inverse,
            of_columns,
            *indices[:3],
            scale,
            margin,
            rows,
            columns,
            ROWS=TALL,
            COLUMNS=BAND,
            num_warps=8,
            **shared,
        )
    wide = 1 << (columns - 1).bit_length()
    band = max(1, SCORES // wide)
    launch(
        whole_kernel,
        (cdiv(rows, band),),
        device,
        products,
        operands.inverse,
        panel,
        *of_rows,
        of_columns,
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
        COLUMNS=max(SMALLEST, wide),
        num_warps=max(4, min(wide // OF_WARP, _most_warps(device))),
        **shared,
    )


def _most_warps(device):
    return OF_AMD if architecture(device).startswith("gfx") else MOST_WARPS


def rows_backward(grad, unit_grads, operands, x, y, scale, weight, gain, needs_grad, dtype):
    """(dL/dx, dL/dy) in `dtype`, None where not needed.

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

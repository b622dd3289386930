"""Products of 16-bit rows, and the sizes and the memory of panels, by device."""

import functools

import torch

from fastsim.backends.bands import FILLING
from fastsim.backends.panel import memory_of, panel_bytes
from fastsim.operators import constant_result
from fastsim.precision import compute_dtype

# Bytes of a panel of scores. On a CPU, about a last-level cache. Elsewhere, 1 / SHARE of the memory
# of the device, so that products are large and the kernels between them few. It is a share of all
# memory, not of the free memory: the size of a panel decides the order in which numbers are added,
# and the same input has to give the same bits.
CPU_PANEL = 16 << 20
# Every panel reads and writes the whole gradient of the columns.
SMALLEST_PANEL, LARGEST_PANEL, SHARE = 64 << 20, 512 << 20, 64
FEWEST_ROWS = 64  # of a block of whole rows; products of fewer rows are slow
# Up to this many scores, single operations on the whole matrix take no longer than the calls of the
# passes: on a CPU; elsewhere, if four such matrices fit the memory of a panel.
CPU_SMALL, SMALL = 1 << 18, 1 << 24


def half_products(device, dtype=torch.float16):
    """Whether the device multiplies 16-bit rows into a float32 matrix."""
    if device.type in ("cpu", "mps"):
        return False
    return _half_products(device, dtype, torch.backends.cuda.matmul.allow_fp16_accumulation)


@functools.cache
def _half_products(device, dtype, half_sums):
    """half_sums: whether torch may add up in float16; it may then refuse the product."""
    try:
        rows = torch.zeros(16, 16, dtype=dtype, device=device)
        out = torch.mm(rows, rows, out_dtype=torch.float32)
    except torch.OutOfMemoryError:  # says nothing about the device
        raise
    except (RuntimeError, TypeError):
        return False
    return out.dtype == torch.float32


def multiply(left, right, out, *, accumulate=False):
    """out = left @ right, or out += left @ right; `out` may be float32 for 16-bit operands."""
    if left.dtype == out.dtype:
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
    elif out.device.type == "cpu":
        multiply(left.to(out.dtype), right.to(out.dtype), out, accumulate=accumulate)
    elif accumulate:
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)


def multiply_each(left, right, out):
    """`multiply` for stacks of matrices: out (K, R, C) = left (K, R, D) @ right (K, D, C)."""
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    elif out.device.type == "cpu":
        multiply_each(left.to(out.dtype), right.to(out.dtype), out)
    else:
        torch.ops.aten.bmm.dtype_out(left, right, out.dtype, out=out)


# ---- the size of panels ----


def panel_scores(device):
    """How many float32 scores a panel on the device holds."""
    return panel_bytes(_panel(device)) // 4


def matrix_scores(device):
    """How many scores a matrix may have to be one panel, even if it exceeds a CPU's caches.

    A loss that also depends on columns then computes the scores once instead of twice.
    """
    return panel_scores(device) * (4 if device.type == "cpu" else 1)


def small_scores(device):
    """How many scores a matrix may have to be computed at once, by single operations."""
    if device.type == "cpu":
        return CPU_SMALL
    return max(FILLING, min(SMALL, panel_scores(device) // 4))


def widest(device):
    """The largest number of columns of a block."""
    return max(FEWEST_ROWS, panel_scores(device) // FEWEST_ROWS)


def block_shape(rows, columns, device, whole_rows):
    """(rows, columns) of a block."""
    wide = columns if whole_rows else min(columns, widest(device))
    tall = max(1, panel_scores(device) // wide)
    # Blocks of equal height: products of a last block of few rows would be slow.
    bands = -(-rows // tall)
    return -(-rows // bands), wide


class Workspace:
    """Memory that one panel after the other reuses."""

    def __init__(self):
        self._memory = {}
        self._beside = {}

    def beside(self, other):
        """The workspace for the scores of a `Guide` or of `Factors`."""
        return self._beside.setdefault(type(other), Workspace())

    def panel(self, left, right):
        """An empty panel for the products of rows `left` and `right`."""
        dtype = compute_dtype(left)
        return self._empty(left, (left.shape[0], right.shape[0]), dtype)

    def operand(self, panel, dtype):
        """Where score gradients in `dtype` go: to the panel itself if it has that dtype."""
        return panel if panel.dtype == dtype else self._empty(panel, panel.shape, dtype)

    def _empty(self, like, shape, dtype):
        count = shape[0] * shape[1]
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < count:
            memory = self._memory[dtype] = like.new_empty(count, dtype=dtype)
        return (memory if memory.numel() == count else memory[:count]).view(shape)


def _panel(device):
    return CPU_PANEL if device.type == "cpu" else _share(device)


@constant_result
def _share(device):
    return min(LARGEST_PANEL, max(SMALLEST_PANEL, memory_of(device) // SHARE))

"""The Triton backend: a product of unit rows with the loss as an epilogue, on NVIDIA and AMD GPUs.

A forward pass writes partial results of each tile and merges them in a fixed order. Library
products multiply panels of score gradients by the rows. The operands of 16-bit inputs are float16:
the rows themselves, scaled by powers of two, whose products are exact (`ScaledRows`). A power of
two also brings their score gradients into the range of float16 (`loss_scale`). Products of float32
operands follow torch.get_float32_matmul_precision(). The host never waits for the device. The
kernels are in fastsim/backends/triton/kernels, which is imported on first use.

Let u = N M D. Forward and backward take 6u operations if each score is computed once, and 8u if it
is computed twice.
    Elementwise losses take 6u. Loss and score gradient come from one product.
    Losses that depend on rows alone take 6u, as the scores are kept in 16 bits for the score
        gradients (kernels/kept.py). Below the depth that kernels/table.py names they take 8u.
    Losses that also depend on columns or on the whole matrix take as many as losses that depend on
        rows alone if the matrix fits into the panel, else 8u. It fits up to 13,500 to 27,000 rows
        and columns, depending on the memory of the device. FASTSIM_PANEL_MB allows more.
    With float32 operands and dot products a loss takes 8u, unless it is elementwise.
"""

import functools
import os

import torch

from fastsim.backends import lists
from fastsim.backends.base import Backend
from fastsim.backends.extras import ABOVE, DOT, GUIDE, PARTS, UNTARGETED
from fastsim.backends.half_rows import LARGEST, graded
from fastsim.backends.panel import blocks_within, memory_of, panel_bytes
from fastsim.backends.triton import installed
from fastsim.backends.triton.kernels.table import (
    PANEL_LINE,
    SHALLOW,
    architecture,
    block_sizes,
    kept_sizes,
    operand_kind,
)
from fastsim.backends.triton.small_batch import SmallBatch
from fastsim.operators import constant_result
from fastsim.pairs import Pairs
from fastsim.precision import power_of_two

# PANEL and LARGEST_PANEL are the least and the most bytes of a panel of float16 score gradients. A
# panel in float32 takes twice as many. Between these bounds a panel takes 1 / SHARE of the device's
# memory. FASTSIM_PANEL_MB sets another size; with 8,200 a matrix of 65,536 x 65,536 is one panel.
# With 65,536 columns the smallest panel has 2816 rows: its product with rows of 768 features has
# 132 tiles, one for each multiprocessor of an H200. The gradient of the columns is a sum over
# panels: with the largest panel it is read and written a quarter as often.
PANEL, LARGEST_PANEL, SHARE = 352 << 20, 1408 << 20, 64
# The most columns of a block of whole rows. With more columns the products have too few rows.
MOST_COLUMNS = 1 << 17
# The most columns of any other block. With more rows in a block, the sums over panels are read back
# less often.
PART_COLUMNS = 1 << 14
# The rows of a block are a multiple of this number, so that only the last tile is ragged.
ROW_MULTIPLE = 128
OLDEST_TRITON = (3, 6)
# The least bound on score gradients. The loss scale and its inverse are then normal numbers.
SMALLEST = 2.0**-85


def interpreting():
    """Whether Triton's interpreter runs the kernels (on CPU tensors, for tests)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@constant_result
def _unsupported_device(device):
    """None if the installed Triton and torch serve this GPU, else a sentence that says why not."""
    return _found_unsupported(device, torch.backends.cuda.matmul.allow_fp16_accumulation)


@functools.cache
def _found_unsupported(device, half_sums):
    """`_unsupported_device`, once for each value of `half_sums`.

    half_sums: whether torch may add up products in float16; it may then refuse the product below.
    """
    version = installed.version()
    if not version or tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"it wants Triton {oldest} or later, got {version or 'one of unknown version'}"
    capability = torch.cuda.get_device_capability(device)
    if not torch.version.hip and capability < (8, 0):
        return f"it wants compute capability 8.0 or later, got {'.'.join(map(str, capability))}"
    half = torch.ones(16, 16, dtype=torch.float16, device=f"cuda:{device}")
    try:
        sums = torch.empty(16, 16, dtype=torch.float32, device=half.device)
        for accumulate in (False, True):
            _wide_product(half, half, sums, accumulate=accumulate)
    except torch.OutOfMemoryError:  # says nothing about the device
        raise
    except (RuntimeError, AttributeError) as error:
        why = str(error).splitlines()[0]
        return f"torch's product of float16 matrices with a float32 result fails here: {why}"
    return None


def _wide_product(left, right, out, *, accumulate):
    """out = left @ right, or out += left @ right; `out` has a wider type than the operands."""
    if accumulate:
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)


@functools.cache
def _passes():
    """The module that launches the kernels; importing it imports triton."""
    from fastsim.backends.triton.kernels import passes

    return passes


@functools.cache
def _operands():
    from fastsim.backends.triton.kernels import operands

    return operands


@functools.cache
def _scan():
    from fastsim.backends.triton.kernels import lists

    return lists


class TritonBackend(SmallBatch, Backend):
    """float16, bfloat16 and float32 tensors on a GPU."""

    name = "triton"

    automatic = False
    by_verdict = True
    extras = frozenset({DOT, ABOVE, GUIDE, UNTARGETED, PARTS})

    def unsupported_reason(self, *tensors, kind=None):
        if not installed.FOUND:
            return "Triton is not installed (pip install triton)"
        device_type = "cpu" if interpreting() else "cuda"
        for tensor in tensors:
            if tensor.device.type != device_type:
                on_gpu = device_type == "cuda"
                tensors_served = "GPU tensors" if on_gpu else "CPU tensors (TRITON_INTERPRET=1)"
                return f"it serves {tensors_served}, got one on {tensor.device}"
            if tensor.dtype == torch.float64:
                return "it serves float16, bfloat16 and float32, got torch.float64"
        if device_type == "cuda":
            if not torch.cuda.is_available():
                return "no GPU is visible (TRITON_INTERPRET=1 runs the kernels on CPU tensors)"
            device = tensors[0].device.index if tensors else torch.cuda.current_device()
            if (reason := _unsupported_device(device)) is not None:
                return reason
        return self.unsupported_kind(kind)

    def kinds(self):
        from fastsim.backends.triton.kernels.passes import KINDS

        return KINDS

    def turning_widths(self, dtype, device):
        arch = architecture(device)
        key = arch, operand_kind(dtype, arch), SHALLOW + 1
        widths = {block_sizes(*key).break_even, kept_sizes(*key).break_even}
        return sorted(widths - {0})  # the interpreter has 0, and no row is narrower

    def note(self):
        return ", interpreted on CPU tensors" if interpreting() else self._verified()

    def _verified(self):
        """What `note` says about the verdicts for this device."""
        from fastsim.verify import verdicts  # it imports the package of the backends

        device, name = torch.cuda.current_device(), torch.cuda.get_device_name()
        found = verdicts.current(self.name, torch.device("cuda", device))
        usable = sum(verdict.may_be_taken for verdict in found)
        status = f"unverified on this device ({name}): `auto` leaves it out"
        if found:
            status = f"`auto` takes it by {usable} of {len(found)} verdicts on this device ({name})"
        return f', {status}, backend="{self.name}" asks for it'

    def multiply(self, left, right, out, *, accumulate):
        right = graded(right)
        if left.dtype == out.dtype:
            super().multiply(left, right, out, accumulate=accumulate)
        elif out.device.type == "cpu":
            super().multiply(left.to(out.dtype), right.to(out.dtype), out, accumulate=accumulate)
        else:
            _wide_product(left, right, out, accumulate=accumulate)

    def loss_scale(self, tile, weights, dtype, columns, coefficients=None):
        if dtype.itemsize != 2:
            return None
        if coefficients is not None:
            largest = tile.record.largest_of(tile, coefficients, columns)
        else:
            size = tile.scale.new_ones(()) if weights is None else weights.abs().float()
            largest = tile.record.largest_score_grad(tile, size, columns)
        # Infinity, NaN and 0 are the same with any loss scale: their bound does not matter.
        largest = largest.float().nan_to_num(nan=LARGEST, posinf=LARGEST).clamp_(min=SMALLEST)
        return power_of_two(largest).reciprocal_().mul_(LARGEST)

    def unit_rows(self, x, dtype=None):
        return _operands().unit_rows(x, dtype)

    def tile_rows(self, x):
        return _operands().tile_rows(x)

    def dot_rows(self, x):
        return _operands().dot_rows(x) if x.dtype == torch.bfloat16 else super().dot_rows(x)

    def scales_rows(self, dtype):
        return dtype.itemsize == 2

    def operand(self, rows, dtype):
        if rows.dtype.itemsize == 2:
            return self.tile_rows(rows)[0]
        return _operands().operand(rows, dtype)

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        return _operands().unit_rows_backward(grad_unit, x, inverse, factor, dtype)

    def tile_rows_backward(self, grad_rows, x, inverse, factor, dtype):
        scaled = x.dtype.itemsize == 2
        return _operands().unit_rows_backward(grad_rows, x, inverse, factor, dtype, scaled=scaled)

    def whole_rows_fit(self, columns, device):
        return columns <= MOST_COLUMNS

    def whole_matrix_fits(self, rows, columns, device):
        return columns <= MOST_COLUMNS and 2 * rows * _padded(columns) <= _panel_bytes(device)

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        shape = _block_shape(rows, columns, device, whole_rows)
        return blocks_within(rows, columns, *shape, lower=lower)

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        rows, columns = _block_shape(len(unit_x), len(unit_y), unit_x.device, whole_rows)
        return unit_x.new_empty(rows * _padded(columns))

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        return _passes().forward(tile, unit_x, unit_y, sums)

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        panel = _panel(workspace, block)
        if weights is not None and weights.ndim:
            weights = weights[block[0]]
        return _passes().fused_pass(tile, unit_x, unit_y, block, weights, panel), panel

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        panel = _panel(workspace, block)
        passes = _passes()
        block_coefficients = tile.coefficients_of_block(coefficients, block)
        passes.score_grad(tile, unit_x, unit_y, block, block_coefficients, panel)
        return panel

    def paired_scores(self, unit_x, unit_y):
        positives = torch.arange(unit_x.shape[0], device=unit_x.device)
        return self.positive_scores(Pairs(positives), unit_x, unit_y)

    def positive_scores(self, pairs, unit_x, unit_y):
        return _passes().positive_scores(pairs, unit_x, unit_y)

    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, row_metrics=None):
        return _passes().closest(pairs, semi_hard, unit_x, unit_y, ceilings)

    def hardest(self, pairs, offsets, x, y):
        return _passes().hardest(pairs, offsets, x, y)

    def top_k(self, queries, corpus, k):
        return lists.top_k(self, queries, corpus, k)

    def cosent(self, scores, labels, scale, want_score_grad):
        return lists.cosent(_scan().running_sums, scores, labels, scale, want_score_grad)


def _padded(columns):
    """`columns`, rounded up to whole lines of a panel."""
    return -(-columns // PANEL_LINE) * PANEL_LINE


def _panel_bytes(device):
    return panel_bytes(min(LARGEST_PANEL, max(PANEL, memory_of(device) // SHARE)))


def _block_shape(rows, columns, device, whole_rows):
    """(rows, columns) of a block of at most `_panel_bytes` in float16, or twice that in float32."""
    columns = columns if whole_rows else min(columns, PART_COLUMNS)
    row_bytes, most = 2 * _padded(columns), _panel_bytes(device)
    if rows * row_bytes > most:
        rows = min(rows, max(1, most // (row_bytes * ROW_MULTIPLE)) * ROW_MULTIPLE)
    return rows, columns


def _panel(workspace, block):
    rows, columns = (part.stop - part.start for part in block)
    stride = _padded(columns)
    return workspace[: rows * stride].view(rows, stride)[:, :columns]

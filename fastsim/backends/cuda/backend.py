"""The CUDA backend: the passes of the Triton backend in CUDA C++, for NVIDIA GPUs from sm_80 on.

Panels, library products and the range of score gradients are those of
fastsim/backends/triton/backend.py. The tiles are in csrc/cuda. On sm_90 they use bulk copies and
warpgroup products, and an epilogue runs during the products of the next tile. On other
architectures, and for float32, they use asynchronous copies and warp products.
"""

from pathlib import Path

import torch

from fastsim.backends import lists
from fastsim.backends.cuda import passes as cuda_passes
from fastsim.backends.extras import DOT, EXTRAS
from fastsim.backends.triton import installed
from fastsim.backends.triton.backend import TritonBackend, _panel, interpreting
from fastsim.operators import constant_once

LIBRARY = Path(__file__).parents[2] / "_lib" / "cuda.so"


@constant_once
def load():
    """None if the library is loaded, else a sentence that says why it cannot be."""
    if not LIBRARY.exists():
        return (
            "the CUDA extension was not built; install the CUDA toolkit (nvcc) and reinstall"
            " fastsim with FASTSIM_BUILD=cpu,cuda"
        )
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the CUDA extension does not load: {error}"
    return None


class CudaBackend(TritonBackend):
    """float16, bfloat16 and float32 tensors on an NVIDIA GPU."""

    name = "cuda"
    extras = frozenset()

    def unsupported_reason(self, *tensors, kind=None):
        for tensor in tensors:
            if tensor.device.type != "cuda":
                return f"it serves GPU tensors, got one on {tensor.device}"
            if tensor.dtype == torch.float64:
                return "it serves float16, bfloat16 and float32, got torch.float64"
        if reason := load():
            return reason
        if not torch.cuda.is_available() or torch.version.hip:
            return "no NVIDIA GPU is visible"
        if torch.cuda.get_device_capability(tensors[0].device if tensors else None) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or later"
        return self.unsupported_kind(kind)

    def kinds(self):
        return cuda_passes.KINDS

    def note(self):
        return self._verified()

    def serves_one_call(self, tile, rows, columns, width, self_similarity, dtype):
        """As the Triton backend, with its kernels, if Triton can compile and launch them."""
        if not super().serves_one_call(tile, rows, columns, width, self_similarity, dtype):
            return False
        tensor = next(tensor for tensor in tile.pairs.tensors() if tensor is not None)
        if interpreting() or not installed.has_compiler():
            return False
        return TritonBackend().unsupported_reason(tensor) is None

    def unit_rows(self, x, dtype=None):
        return cuda_passes.unit_rows(x, dtype)

    def scales_rows(self, dtype):
        return False

    def operand(self, rows, dtype):
        return cuda_passes.operand(rows, dtype)

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        return cuda_passes.unit_rows_backward(grad_unit, x, inverse, factor, dtype)

    def tile_rows(self, x):
        return self.unit_rows(x)

    def dot_rows(self, x):
        cuda_passes.refuse(EXTRAS[DOT])

    def tile_rows_backward(self, grad_rows, x, inverse, factor, dtype):
        return self.unit_rows_backward(grad_rows, x, inverse, factor, dtype)

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        return cuda_passes.forward(tile, unit_x, unit_y)

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        panel = _panel(workspace, block)
        if weights is not None and weights.ndim:
            weights = weights[block[0]]
        return cuda_passes.fused_pass(tile, unit_x, unit_y, block, weights, panel), panel

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        panel = _panel(workspace, block)
        block_coefficients = tile.coefficients_of_block(coefficients, block)
        cuda_passes.score_grad(tile, unit_x, unit_y, block, block_coefficients, panel)
        return panel

    def paired_scores(self, unit_x, unit_y):
        return cuda_passes.paired_scores(unit_x, unit_y)

    def positive_scores(self, pairs, unit_x, unit_y):
        return self.paired_scores(unit_x, unit_y[pairs.positives])

    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, row_metrics=None):
        return cuda_passes.closest(pairs, semi_hard, unit_x, unit_y, ceilings)

    def hardest(self, pairs, offsets, x, y):
        cuda_passes.refuse("it has no kernels of kind 'hardest'")

    def cosent(self, scores, labels, scale, want_score_grad):
        return lists.cosent(cuda_passes.running_sums, scores, labels, scale, want_score_grad)

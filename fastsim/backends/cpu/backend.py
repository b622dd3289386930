"""The compiled CPU backend: panels of scores that stay in cache, its own products and epilogues."""

import torch

from fastsim.backends.base import Backend
from fastsim.backends.cpu import amx, blas, max_sim
from fastsim.backends.cpu.further import InOneSoftmax
from fastsim.backends.cpu.library import UNAVAILABLE, most_levels
from fastsim.backends.cpu.one_call import InOneCall
from fastsim.backends.cpu.panels import Panels
from fastsim.backends.cpu.passes import served
from fastsim.backends.cpu.rows import Rows
from fastsim.backends.cpu.selection import Selection
from fastsim.backends.extras import EXTRAS
from fastsim.batch_metrics import TOTALS
from fastsim.kinds import LATE_INTERACTION, SELECTIONS
from fastsim.precision import compute_dtype

_KINDS = {*served(), *SELECTIONS, *LATE_INTERACTION}


class CpuBackend(Panels, InOneCall, InOneSoftmax, Selection, Rows, Backend):
    """Panels are float32 or float64; unit rows of 16-bit inputs are float32."""

    name = "cpu"
    most_levels = most_levels()
    extras = frozenset(EXTRAS)
    keeps_scores = True
    records_metrics = True

    def unsupported_reason(self, *tensors, kind=None):
        for tensor in tensors:
            if tensor.device.type != "cpu":
                return f"it serves CPU tensors, got one on {tensor.device}"
        return UNAVAILABLE or self.unsupported_kind(kind)

    def kinds(self):
        return _KINDS

    def note(self):
        which = "products" if amx.is_matrix_unit() else "products of bfloat16"
        products = f", {which} on {amx.name()}" if amx.name() else ""
        panels = ", panels by BLAS" if blas.IN_USE else ""
        return f", {torch.ops.fastsim_cpu.instruction_set()} kernels{products}{panels}"

    def number(self, scalar):
        return scalar.item()

    def batch_totals(self, row_metrics, x, y):
        total = row_metrics.new_empty(len(TOTALS))
        torch.ops.fastsim_cpu.batch_totals(row_metrics, x, y, total)
        return total

    def cosent(self, scores, labels, scale, want_score_grad):
        compute = scores.to(compute_dtype(scores)).contiguous()
        if labels.dtype in (torch.bool, torch.float16, torch.bfloat16):
            labels = labels.to(torch.float32)
        loss = scores.new_empty((), dtype=torch.float64)
        score_grad = torch.empty_like(compute) if want_score_grad else None
        torch.ops.fastsim_cpu.cosent(compute, labels.contiguous(), scale, loss, score_grad)
        return loss.to(compute.dtype), score_grad

    def max_sim(self, x, y, cosine, own_documents, scores, places):
        max_sim.max_sim(x, y, cosine, own_documents, scores, places)

    def max_sim_backward(self, grad, places, x, y, cosine, own_documents, needs_grad):
        return max_sim.max_sim_backward(grad, places, x, y, cosine, own_documents, needs_grad)

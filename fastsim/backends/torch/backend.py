"""The backend in plain torch: library products and torch operations, on any device.

It is for GPUs on which no kernel of ours has been verified, for other accelerators, and for a CPU
without a compiler. One panel of scores is alive at a time: a library product writes the scores,
torch operations (epilogues/) reduce them and turn them into score gradients in place, and library
products multiply these by the rows. 16-bit inputs become float16 unit rows if the device multiplies
such rows into float32 scores, else float32 rows. Nothing waits for the device.
"""

from dataclasses import replace

import torch

from fastsim.backends import half_rows
from fastsim.backends.base import Backend
from fastsim.backends.extras import EXTRAS
from fastsim.backends.half_rows import graded, scored
from fastsim.backends.panel import blocks_within
from fastsim.backends.torch import cosent, max_sim, panels, rows, selection, steps
from fastsim.backends.torch.block import Block
from fastsim.backends.torch.epilogues import EPILOGUES
from fastsim.backends.torch.row_metrics import add_row_metrics
from fastsim.backends.torch.small_batch import SmallBatch
from fastsim.backends.torch.states import States
from fastsim.backends.triton.backend import TritonBackend
from fastsim.kinds import LATE_INTERACTION, SELECTIONS
from fastsim.pairs import part_of
from fastsim.precision import compute_dtype


class TorchBackend(SmallBatch, Backend):
    """Every floating-point tensor on every device."""

    name = "torch"
    extras = frozenset(EXTRAS)
    records_metrics = True

    def unsupported_reason(self, *tensors, kind=None):
        return self.unsupported_kind(kind)

    def kinds(self):
        return {*EPILOGUES, *SELECTIONS, *LATE_INTERACTION}

    def note(self):
        return ", on any device; GPUs with Triton compile what is between its products"

    def number(self, scalar):
        return scalar.item() if scalar.device.type == "cpu" else scalar

    def multiply(self, left, right, out, *, accumulate):
        panels.multiply(left, graded(right), out, accumulate=accumulate)

    def loss_scale(self, tile, weights, dtype, columns, coefficients=None):
        half = isinstance(tile.scale, torch.Tensor) and self._half(tile.scale.device, dtype)
        arguments = tile, weights, dtype, columns, coefficients
        return TritonBackend.loss_scale(self, *arguments) if half else None

    @staticmethod
    def _half(device, dtype):
        return dtype.itemsize == 2 and panels.half_products(device)

    def unit_rows(self, x, dtype=None):
        if dtype is None:
            half = self._half(x.device, x.dtype)
            dtype = torch.float16 if half else compute_dtype(x)
        return rows.unit_rows(x, dtype)

    def dots_of_16_bits(self, x):
        """Whether dot products of the rows x are computed from 16-bit operands."""
        return self._half(x.device, x.dtype) and panels.half_products(x.device, x.dtype)

    def dot_rows(self, x):
        if x.dtype == torch.bfloat16 and self.dots_of_16_bits(x):
            return half_rows.dot_rows(x, lambda rows: rows)
        return super().dot_rows(x)

    def operand(self, rows, dtype):
        return rows.to(torch.float16) if self._half(rows.device, dtype) else rows

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        return rows.unit_rows_backward(grad_unit, x, inverse, factor, dtype)

    # ---- panels ----

    def whole_rows_fit(self, columns, device):
        return columns <= panels.widest(device)

    def whole_matrix_fits(self, rows, columns, device):
        return rows * columns <= panels.matrix_scores(device)

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        shape = panels.block_shape(rows, columns, device, whole_rows)
        return blocks_within(rows, columns, *shape, lower=lower)

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        return panels.Workspace()

    def scores(self, unit_x, unit_y, place, workspace):
        """The score panel of a block, in the workspace."""
        sides = zip((unit_x, unit_y), place, strict=True)
        left, right = (scored(part_of(unit, part))[0] for unit, part in sides)
        panel = workspace.panel(left, right)
        panels.multiply(left, right.t(), panel)
        return panel

    def block(self, pairs, unit_x, unit_y, place, workspace, scale=None):
        """The `Block` of the slices `place`, with its scores and those of the guide.

        scale: the scale of the logits, needed if the columns have a bias.
        """
        guide, guided = pairs.guide, None
        if guide is not None:
            guided = self.scores(guide.rows, guide.columns, place, workspace.beside(guide))
        panel = self.scores(unit_x, unit_y, place, workspace)
        biased = pairs.column_bias is not None
        bias = pairs.score_bias(place[1], scale) if biased else None
        block = Block.of(pairs, place, panel, unit_y.shape[0], guided, bias)
        if pairs.factors is not None:
            beside = workspace.beside(pairs.factors)
            block.dense = self.scores(pairs.factors.rows, pairs.factors.columns, place, beside)
        if pairs.row_shift is not None:
            block.panel.sub_(pairs.row_shift[place[0], None])
        return block

    def _block(self, tile, unit_x, unit_y, place, workspace):
        """The `Block` of the pairs of a tile, with its weights of positives."""
        block = self.block(tile.pairs, unit_x, unit_y, place, workspace, tile.scale)
        if tile.positive_weights is not None:
            block.positive_weights = part_of(tile.positive_weights, place[0])
        return block

    # ---- passes ----

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        columns = unit_y.shape[0]
        if sums is None and tile.whole_rows and not self.whole_rows_fit(columns, unit_x.device):
            # First the sums over whole rows, then the terms that need them.
            count = sum(part.size for part in tile.parts if not part.needs_row)
            sums = self._reduced(replace(tile, row_metrics=None), unit_x, unit_y, None)[:count]
        return self._reduced(tile, unit_x, unit_y, sums)

    def _reduced(self, tile, unit_x, unit_y, sums):
        rows, columns, device = unit_x.shape[0], unit_y.shape[0], unit_x.device
        states, workspace = States(tile, sums), panels.Workspace()
        for place in self.blocks(rows, columns, device, lower=tile.pairs.each_once):
            block = self._block(tile, unit_x, unit_y, place, workspace)
            _add_row_metrics(tile, block, place)
            block_sums = None if sums is None else [part[place[0]] for part in sums]
            states.add(steps.forward(tile, block, block_sums), place)
        return states.result()

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        whole = self._block(tile, unit_x, unit_y, block, workspace)
        _add_row_metrics(tile, whole, block)
        if weights is not None and weights.ndim:
            weights = part_of(weights, block[0])
        out = workspace.operand(whole.panel, unit_x.dtype)
        return steps.fused(tile.of_rows(block[0]), whole, weights, out), out

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        scores = self._block(tile, unit_x, unit_y, block, workspace)
        out = workspace.operand(scores.panel, unit_x.dtype)
        steps.score_grad(tile, scores, tile.coefficients_of_block(coefficients, block), out)
        return out

    def paired_scores(self, unit_x, unit_y):
        workspace, parts = panels.Workspace(), []
        unit_x, unit_y = scored(unit_x)[0], scored(unit_y)[0]
        square = 128 if unit_x.device.type == "cpu" else 1024  # a GPU: few products
        for x, y in zip(unit_x.split(square), unit_y.split(square), strict=True):
            panel = workspace.panel(x, y)
            panels.multiply(x, y.t(), panel)
            parts.append(panel.diagonal().clone())
        return torch.cat(parts)

    # ---- selection and lists ----

    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, row_metrics=None):
        return selection.closest(self, pairs, semi_hard, unit_x, unit_y, ceilings, row_metrics)

    def hardest(self, pairs, offsets, x, y):
        return selection.hardest(self, pairs, offsets, x, y)

    def max_sim(self, x, y, cosine, own_documents, scores, places):
        max_sim.max_sim(self, x, y, cosine, own_documents, scores, places)

    def max_sim_backward(self, grad, places, x, y, cosine, own_documents, needs_grad):
        return max_sim.max_sim_backward(self, grad, places, x, y, cosine, own_documents, needs_grad)

    def top_k(self, queries, corpus, k):
        return selection.top_k(self, queries, corpus, k)

    def cosent(self, scores, labels, scale, want_score_grad):
        return cosent.cosent(scores, labels, scale, want_score_grad)


def _add_row_metrics(tile, block, place):
    if tile.row_metrics is not None:
        add_row_metrics(block, tile.row_metrics[place[0]])

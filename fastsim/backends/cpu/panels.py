"""Panels of scores of the CPU backend: their products, forward passes and score gradients."""

from dataclasses import replace

import torch

from fastsim.backends.cpu import amx, blas, memory, sizes
from fastsim.backends.cpu.mirrored import Mirrored, mirrors
from fastsim.backends.cpu.passes import forward_of, pair_arguments, write_score_grad
from fastsim.backends.cpu.sweep import SWEPT, CpuSweep
from fastsim.backends.cpu.workspace import Columns, Workspace
from fastsim.backends.panel import blocks_within
from fastsim.precision import compute_dtype


class Panels:
    """The part of `CpuBackend` for passes over panels of scores."""

    def whole_rows_fit(self, columns, device):
        return columns <= sizes.WIDEST

    def gradient_rows(self, rows, dtype):
        return memory.empty(rows.shape, dtype)

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        shape = sizes.block_shape(rows, columns, whole_rows)
        return blocks_within(rows, columns, *shape, lower=lower, aligned=sizes.ALIGNED)

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        shape = sizes.block_shape(rows, columns, whole_rows)
        kept = sizes.rows_kept(rows, shape) if keep and shape[1] == columns else 0
        return Workspace(unit_y, *shape, kept)

    def scores(self, unit_x, unit_y, block, workspace, tile=None):
        """The score panel of a block, in the memory of the workspace.

        With a tile, its thresholds, guide, column bias and row shift are applied: pairs that are
        left out get a score below all others. Row metrics need the scores before a bias or a shift:
        if there is one, they are recorded here, otherwise by the first operator that reduces the
        panel.
        """
        rows, columns = block
        pairs = None if tile is None else tile.pairs
        panel = workspace.panel(block)
        workspace.fill(panel, unit_x, rows, columns.start)
        if pairs is not None and pairs.thresholds is not None:
            torch.ops.fastsim_cpu.leave_out_above(panel, panel, pairs.thresholds[rows])
        if pairs is not None and pairs.guide is not None:
            guide = pairs.guide
            cosines = self.scores(guide.rows, guide.columns, block, workspace.beside(guide))
            positives = None if pairs.positives is None else _Positives(pairs, block, panel)
            torch.ops.fastsim_cpu.leave_out_above(panel, cosines, guide.thresholds[rows])
            if positives is not None:
                positives.restore(panel)
        if pairs is not None and tile.row_metrics is not None and _shifts_scores(pairs):
            torch.ops.fastsim_cpu.record_metrics(
                panel, *self._pairs(pairs, block, workspace, tile.row_metrics)
            )
        if pairs is not None and pairs.column_bias is not None:
            panel.add_(pairs.score_bias(columns, tile.scale))
        if pairs is not None and pairs.row_shift is not None:
            panel.sub_(pairs.row_shift[rows, None])
        return panel

    def paired_scores(self, unit_x, unit_y):
        rows, side = len(unit_x), sizes.PAIRED
        # The result and the memory of the panels are allocated before the loop: memory allocated
        # for each block would fragment the heap.
        dtype = compute_dtype(unit_x)
        paired = torch.empty(rows, dtype=dtype, device=unit_x.device)
        workspace = Workspace(unit_y, side, side)
        for first in range(0, rows, side):
            part = slice(first, min(rows, first + side))
            paired[part] = self.scores(unit_x, unit_y, (part, part), workspace).diagonal()
        return paired

    def positive_scores(self, pairs, unit_x, unit_y):
        # In parts, as the chosen rows of unit_y are copied.
        scores = []
        for first in range(0, max(1, unit_x.shape[0]), sizes.PAIRED):
            part = slice(first, first + sizes.PAIRED)
            scores.append(self.paired_scores(unit_x[part], unit_y[pairs.positives[part]]))
        return torch.cat(scores)

    def multiply(self, left, right, out, *, accumulate):
        if blas.serves(right):
            blas.multiply(left, right, out, accumulate)
            return
        transposed = left.stride(1) != 1
        panel = left.t() if transposed else left
        if amx.parts_of(right):
            amx.multiply(panel, right, out, transposed, accumulate)
        else:
            torch.ops.fastsim_cpu.multiply(panel, right, out, transposed, accumulate)

    def products(self, columns):
        packed = Columns(columns, repack=False)

        def multiply(rows):
            panel = rows.new_empty(len(rows), len(columns))
            packed.fill(panel, rows, 0)
            return panel

        return multiply

    def _pairs(self, pairs, block, workspace, row_metrics=None):
        """`pair_arguments` of a block; targets that are `Factors` are computed here."""
        factors, targets = pairs.factors, None
        if factors is not None:
            of_factors = workspace.beside(factors)
            targets = self.scores(factors.rows, factors.columns, block, of_factors)
        return pair_arguments(pairs, block, targets, row_metrics)

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        state = forward_of(tile, rows, columns)
        if sums is not None:
            state.know(sums)
        whole, lower = tile.whole_rows, tile.pairs.each_once
        workspace = workspace or self.workspace(unit_x, unit_y, whole_rows=whole)
        # In reverse order, so that score gradients begin with the panels computed last.
        blocks = self.blocks(rows, columns, unit_x.device, whole_rows=whole, lower=lower)
        for block in reversed(list(blocks)):
            panel = self.scores(unit_x, unit_y, block, workspace, tile)
            row_metrics = None if _shifts_scores(tile.pairs) else tile.row_metrics
            state.add(panel, self._pairs(tile.pairs, block, workspace, row_metrics), block)
            workspace.keep(block, panel)
        return state.result()

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        panel = self.scores(unit_x, unit_y, block, workspace, tile)
        state = forward_of(tile.of_rows(block[0]), *panel.shape)
        row_metrics = None if _shifts_scores(tile.pairs) else tile.row_metrics
        pairs = self._pairs(tile.pairs, block, workspace, row_metrics)
        state.fused_pass(panel, pairs, weights[block[0]])
        return state.result(), panel

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        panel = workspace.kept(block)
        if panel is None:
            panel = self.scores(unit_x, unit_y, block, workspace, tile)
        else:
            tile = replace(tile, margin=0.0)  # the forward pass subtracted it from the kept scores
        pairs = self._pairs(tile.pairs, block, workspace)
        write_score_grad(tile, panel, pairs, block, coefficients)
        return panel

    def mirrored(self, tile, unit, *, keep=False):
        if not mirrors(tile, unit):
            return None
        return Mirrored(self, tile, unit, keep=keep)

    def sweeps(self, tile, dtype, device):
        return tile.kind in SWEPT

    def sweep_pays(self, rows, columns):
        return not sizes.is_one_block(rows, columns)

    def sweep(self, tile, x, y, *, whole_rows, keep=False):
        return CpuSweep(tile, x, y, whole_rows=whole_rows, keep=keep)


def _shifts_scores(pairs):
    """Whether the loss adds a bias of columns or a shift of rows to the scores."""
    return pairs.column_bias is not None or pairs.row_shift is not None


class _Positives:
    """The scores of `Pairs.positives` in a panel; a guide must not leave these out."""

    def __init__(self, pairs, block, panel):
        rows, columns = block
        within = (pairs.positives[rows] - columns.start)[:, None]
        self.inside = (within >= 0) & (within < panel.shape[1])
        self.columns = within.clamp(0, panel.shape[1] - 1)
        self.scores = panel.gather(1, self.columns)

    def restore(self, panel):
        scores = torch.where(self.inside, self.scores, panel.gather(1, self.columns))
        panel.scatter_(1, self.columns, scores)

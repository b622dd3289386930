"""The panels of a sweep over prefixes on a CPU (the terms: fastsim/engine/sweep.py)."""

import torch

from fastsim.backends.cpu.passes import forward_of, pair_arguments, write_score_grad
from fastsim.backends.cpu.workspace import Workspace, panel_in, panel_memory
from fastsim.backends.panel import blocks_within

# Kinds each of whose steps on the rows of a panel is one operator.
SWEPT = ("softmax", "sigmoid", "squared_error")


class _Steps:
    """The operators on rows of a panel, each of which first copies the scores of a width into it
    and then does to them what comes at the end of the width.
    """

    def __init__(self, *given):
        self._given = given

    def __getattr__(self, name):
        operator = getattr(torch.ops.fastsim_cpu, f"sweep_{name}")
        return lambda panel, *rest: operator(panel, *self._given, *rest)


class CpuSweep:
    """What `Backend.sweep` returns. One panel for the scores, and one for each width's."""

    def __init__(self, tile, x, y, shape):
        self.tile, self.x, self.y = tile, x, y
        self.shape = shape
        self.packed = [Workspace(columns, 0, shape[1]) for columns in y.rows]  # with no panel
        self.scores = panel_memory(y.rows[0], *shape)
        self.panels = self.scores.new_empty(len(y.rows), *self.scores.shape)
        self.ratios = [torch.stack(side.ratios) if side.ratios else None for side in (x, y)]
        rows, columns = len(x), len(y)
        self.zeros = [
            (of_rows, of_columns) if of_rows.any() or of_columns.any() else None
            for of_rows, of_columns in zip(x.zeros, y.zeros, strict=True)
        ]
        self.row_dots, self.column_dots = (
            torch.zeros(len(x.rows), count, dtype=torch.float64) for count in (rows, columns)
        )

    def blocks(self):
        return blocks_within(len(self.x), len(self.y), *self.shape)

    def forward(self):
        rows, columns = len(self.x), len(self.y)
        states = [forward_of(self.tile, rows, columns) for _ in self.x.rows]
        for block in self.blocks():
            for k, state in enumerate(states):
                panel = self._add_scores(k, block)
                state.library = self._steps(k, block, dots=False)
                state.add(panel, pair_arguments(self.tile.pairs, block), block)
        return [state.result() for state in states]

    def fused_pass(self, k, block, weights):
        panel = self._add_scores(k, block)
        state = forward_of(self.tile.of_rows(block[0]), *panel.shape)
        state.library = self._steps(k, block)
        state.fused_pass(panel, pair_arguments(self.tile.pairs, block), weights[block[0]])
        return state.result()

    def score_grad(self, k, block, coefficients):
        panel = self._add_scores(k, block)
        pairs, steps = pair_arguments(self.tile.pairs, block), self._steps(k, block)
        write_score_grad(self.tile, panel, pairs, block, coefficients, steps)

    def carried(self, block):
        """The panels of score gradients, each with its share of the wider prefixes'."""
        panels = self._panels(block)
        for panel, zeros in zip(panels, self.zeros, strict=False):
            if zeros:
                of_rows, of_columns = zeros
                panel[of_rows[block[0]]] = 0
                panel[:, of_columns[block[1]]] = 0
        parts = (
            ratios if ratios is None else ratios[:, part]
            for ratios, part in zip(self.ratios, block, strict=True)
        )
        torch.ops.fastsim_cpu.carry(panels, *parts)
        return panels

    def _panels(self, block):
        rows, columns = block
        return self.panels[:, : rows.stop - rows.start, : columns.stop - columns.start]

    def _add_scores(self, k, block):
        """The panel of a width, after the scores have become its own."""
        rows, columns = block
        self.packed[k].fill(
            panel_in(self.scores, block), self.x.rows[k][rows], columns.start, add=k > 0
        )
        return self._panels(block)[k]

    def _steps(self, k, block, *, dots=True):
        ratios = (
            None if ratios is None or k == len(ratios) else ratios[k][part]
            for ratios, part in zip(self.ratios, block, strict=True)
        )
        of_dots = (self.row_dots[k][block[0]], self.column_dots[k][block[1]])
        of_dots = of_dots if dots else (None, None)
        return _Steps(panel_in(self.scores, block), *ratios, *of_dots)

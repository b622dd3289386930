"""Selections of the CPU backend: closest negatives, hardest pairs, the k largest scores."""

import torch

from fastsim.backends.cpu import amx, blas, mirrored, sizes
from fastsim.backends.cpu.passes import pair_arguments
from fastsim.backends.cpu.workspace import Workspace
from fastsim.backends.panel import blocks_within
from fastsim.kinds.kind import EMPTY
from fastsim.pairs import Pairs


class Selection:
    """The part of `CpuBackend` that selects pairs, in one pass over the scores."""

    def _single_pass(self, unit_x, unit_y):
        """(blocks, workspace) of a pass that reads each score once and multiplies it by nothing."""
        panels = 1 if amx.parts_of(unit_y) or blas.serves(unit_y) else sizes.ONCE
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        shape = sizes.block_shape(rows, columns, False, panels)
        return blocks_within(rows, columns, *shape), Workspace(unit_y, *shape)

    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, row_metrics=None):
        rows, columns = unit_x.shape[0], unit_y.shape[0]
        # The operator reads the ceiling of a row only if its positive is in another block.
        if ceilings is None:
            ceilings = torch.zeros(rows, dtype=unit_x.dtype, device=unit_x.device)
            if semi_hard and columns > sizes.WIDEST:
                ceilings = self.positive_scores(pairs, unit_x, unit_y)
        values = torch.full((rows,), EMPTY, dtype=unit_x.dtype, device=unit_x.device)
        indices = torch.full((rows,), -1, device=unit_x.device)
        blocks, workspace = self._single_pass(unit_x, unit_y)
        for block in blocks:
            part = block[0]
            panel = self.scores(unit_x, unit_y, block, workspace)
            torch.ops.fastsim_cpu.closest(
                panel,
                *pair_arguments(pairs, block, row_metrics=row_metrics),
                semi_hard,
                ceilings[part],
                values[part],
                indices[part],
            )
        return indices

    def hardest(self, pairs, offsets, x, y):
        rows = x.shape[0]
        low, high = x.new_full((rows,), -EMPTY), x.new_full((rows,), EMPTY)
        lowest, highest = (torch.full((rows,), -1, device=x.device) for _ in range(2))
        found = low, lowest, high, highest
        if x is y and not pairs.offset and mirrored.pays(x):
            blocks, shape = mirrored.bands(rows)
            workspace = Workspace(x, *shape)
            operators = mirrored.operators_of(rows, score_grad=False)
            # In this order each row finds its columns in ascending order.
            for block in blocks:
                panel = self.scores(x, x, block, workspace)
                operators.hardest(
                    panel, *mirrored.pairs_of_band(pairs, block, rows), offsets, *found
                )
            return lowest, highest
        blocks, workspace = self._single_pass(x, y)
        for block in blocks:
            part, columns = block
            torch.ops.fastsim_cpu.hardest(
                self.scores(x, y, block, workspace),
                *pair_arguments(pairs, block),
                None if offsets is None else offsets[columns],
                *(values[part] for values in found),
            )
        return lowest, highest

    def serves_hardest_pairs(self, rows, width):
        return rows * rows * width <= sizes.CHEAP and sizes.is_one_block(rows, rows)

    def hardest_pairs(self, x, groups):
        x, count = x.contiguous(), x.shape[0]
        columns = x.new_empty(2, count, dtype=torch.int64)
        distances, largest = x.new_empty(2, count), x.new_empty(())
        torch.ops.fastsim_cpu.hardest_pairs(x, groups, columns, distances, largest)
        return columns, distances, largest

    def top_k(self, queries, corpus, k):
        unit_x, unit_y = self.unit_rows(queries)[0], self.unit_rows(corpus)[0]
        shape = (queries.shape[0], k)
        values = unit_x.new_full(shape, -torch.inf)
        indices = unit_x.new_full(shape, -1, dtype=torch.int64)
        blocks, workspace = self._single_pass(unit_x, unit_y)
        for block in blocks:
            torch.ops.fastsim_cpu.top_k(
                self.scores(unit_x, unit_y, block, workspace),
                *pair_arguments(Pairs(), block),
                k,
                values[block[0]],
                indices[block[0]],
            )
        return values, indices

"""The softmax of all rows and of all columns from one exponential of each score.

    e_ij = exp(scale (s_ij - top)),
    lse of row i = scale top + log sum_j e_ij,   lse of column j = scale top + log sum_i e_ij

One number `top` replaces the maxima of all rows and columns. The same exponential then serves its
row and its column, in the forward pass and in the score gradient. This needs a bound on the scores,
which cosines have.
"""

import torch

from fastsim.backends.cpu.passes import state_of
from fastsim.kinds.kind import over
from fastsim.kinds.softmax import column_weights

# The largest logit with which exponentials relative to 0 are as accurate as those relative to a
# maximum: e^56 = 2e24 and e^-56 leave float32 enough range for their sums, and for the weight of a
# row divided by such a sum.
LARGEST = 56.0


def common_top(tile):
    """A number that may replace the maximum of every row and column; None if there is none."""
    if tile.kind != "softmax" or not tile.symmetric or not tile.cosine:
        return None
    if tile.pairs.positives is None:
        return None
    return 0.0 if abs(tile.scale) * (1 + abs(tile.margin)) <= LARGEST else None


class BothWays:
    """The forward pass and the score gradients of the panels of all widths."""

    def __init__(self, tile, rows, columns, widths, top):
        self.tile, self.top = tile, top
        self.library = None  # the operators for a block
        self.sums, self.logits = state_of(2, widths, rows)
        self.column_sums = state_of(widths, columns)

    def add(self, panels, pairs, block):
        """Adds the scores of the panels to the state, without changing the panels."""
        rows, columns = block
        self.library.softmax_both_forward(
            panels,
            *pairs,
            *self._numbers(),
            self.sums[:, rows],
            self.logits[:, rows],
            self.column_sums[:, columns],
        )

    def result(self):
        """The state of a softmax for all widths."""
        tops = torch.full_like(self.sums, self.top)
        column_tops = torch.full_like(self.column_sums, self.top)
        target_sums = torch.ones_like(self.sums)
        return [tops, self.sums, self.logits, target_sums, column_tops, self.column_sums]

    def coefficients(self, states, weights, dtype):
        """(row weights, column weights, column weights / sums of the columns) of all widths."""
        scaled = [weight.double() * self.tile.scale for weight in weights]
        by_row = 0.5 * torch.stack(scaled)
        by_column = torch.stack(
            [column_weights(self.tile, *pair) for pair in zip(states, scaled, strict=True)]
        )
        return by_row, by_column, over(by_column, self.column_sums).to(dtype)

    def score_grad(self, panels, pairs, block, coefficients):
        rows, columns = block
        by_row, *by_column = coefficients
        self.library.softmax_both_score_grad(
            panels,
            *pairs,
            *self._numbers(),
            self.sums[:, rows],
            by_row[:, rows],
            self.column_sums[:, columns],
            *(coefficient[:, columns] for coefficient in by_column),
        )

    def _numbers(self):
        return self.tile.scale, self.tile.margin, self.top

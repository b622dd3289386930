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

# Up to these logits exponentials relative to 0 are as accurate: e^56 = 2e24 and e^-56 leave float32
# enough range for their sums, and for the weight of a row divided by such a sum.
LARGEST = 56.0


def common_top(tile):
    """A number that may replace the maximum of every row and column, or None."""
    if tile.kind != "softmax" or not tile.symmetric or not tile.cosine:
        return None
    if tile.pairs.positives is None:
        return None
    return 0.0 if abs(tile.scale) * (1 + abs(tile.margin)) <= LARGEST else None


class BothWays:
    """The forward pass of the panels of all widths, and their score gradients."""

    def __init__(self, tile, rows, columns, widths, top):
        self.tile, self.top = tile, top
        self.library = None  # the operators for a block
        self.sums, self.logits = state_of(2, widths, rows)
        self.column_sums = state_of(widths, columns)

    def add(self, panels, pairs, block):
        """Adds the scores of the panels to the state; does not change them."""
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
        of_positives = self.logits, torch.ones_like(self.sums)
        return [tops, self.sums, *of_positives, column_tops, self.column_sums]

    def coefficients(self, states, weights, dtype):
        """For all widths: the weights of rows, of columns, and those of columns over their sums."""
        scaled = [weight.double() * self.tile.scale for weight in weights]
        of_rows = 0.5 * torch.stack(scaled)
        of_columns = torch.stack(
            [column_weights(self.tile, *pair) for pair in zip(states, scaled, strict=True)]
        )
        return of_rows, of_columns, over(of_columns, self.column_sums).to(dtype)

    def score_grad(self, panels, pairs, block, coefficients):
        rows, columns = block
        of_rows, *of_columns = coefficients
        self.library.softmax_both_score_grad(
            panels,
            *pairs,
            *self._numbers(),
            self.sums[:, rows],
            of_rows[:, rows],
            self.column_sums[:, columns],
            *(of_side[:, columns] for of_side in of_columns),
        )

    def _numbers(self):
        return self.tile.scale, self.tile.margin, self.top

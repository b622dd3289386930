"""The passes of a loss over panels of scores."""

import torch

from fastsim.batch_metrics import totals


class Panels:
    """Scores and their gradients, a block at a time.

    Shapes: unit_x (N, D) and unit_y (M, D) are unit rows in the backend's operand precision; a
    block is a slice of rows against a slice of columns; gradients come out in the compute type.
    """

    keeps_scores = False  # whether `forward` leaves scores for the score gradients that follow it
    observes = False  # whether it looks at scores for `fastsim.metrics`, where `Tile.seen` is given

    def number(self, scalar):
        """A 0-d tensor as the passes take it: itself, so that no device has to be waited for."""
        return scalar

    def multiply(self, left, right, out, *, accumulate):
        """out = left @ right, or added to it."""
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)

    def products(self, columns):
        """A function of rows (R, D) -> rows @ columns.T (R, M), for columns (M, D)."""
        return lambda rows: rows @ columns.t()

    def loss_scale(self, tile, weights, dtype, columns, coefficients=None):
        """A power of two () by which to multiply the weights of the losses, or None.

        It brings the score gradients into the range of the panel's type, for inputs of `dtype`
        (`Kind.largest_score_grad` bounds them). coefficients: those of the tile where they are
        known, which bound them closer (`Kind.largest_of`); weights are then not looked at.
        """
        return None

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        """The (rows, columns) slices to visit on a device; `whole_rows`: each has all columns.

        `lower`: blocks may leave out columns up to their first row.
        """
        raise NotImplementedError

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        """Whatever the blocks of one pass reuse, handed back to `fused_pass` and `score_grad`.

        keep: the workspace serves a forward pass and then the score gradients of all its blocks;
        for a backend with `keeps_scores`.
        """
        return None

    def whole_rows_fit(self, columns, device):
        """Whether a block on the device may hold whole rows of that many columns."""
        raise NotImplementedError

    def whole_matrix_fits(self, rows, columns, device):
        """Whether one block on the device may hold the whole matrix, and `fused_pass` serve every
        kind of loss.
        """
        return False

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        """The state of `tile` over the whole matrix: the tensors of `tile.parts`, in their order.

        workspace: one made with `keep`, of which each block then goes to `score_grad` once. sums:
        the sums of each row over all columns, where the terms of a row need them
        (`tile.whole_rows`) and these columns are only some.
        """
        raise NotImplementedError

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        """(state, score gradient panel) of a block of whole rows; `weights` (N,) weigh the losses.

        A loss with a state of columns is called with the whole matrix as its block. A loss with a
        state of the matrix has weights None, or () for its loss scale.
        """
        raise NotImplementedError

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        """The score gradient panel dL/dS of a block from the coefficients of `tile`."""
        raise NotImplementedError

    def mirrored(self, tile, unit, *, keep=False):
        """The passes of a loss of rows against themselves that compute each score for two pairs.

        None where the backend has none, or they do not pay. keep: as of `workspace`. What is
        returned has
            forward(): the state;
            gradient(coefficients, dtype): dL/dunit (N, D) in `dtype`, of rows and columns.
        """
        return None

    def batch_totals(self, seen, x, y):
        """What `Metrics` add up (len(TOTALS),) of `Tile.seen` and of the rows themselves.

        x (N, D), None where scores are no cosines; y (M, D), None where it is x.
        """
        return totals(seen, x, y, self.paired_cosines)

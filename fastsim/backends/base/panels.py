"""The passes of a tile loss over panels of scores."""

import torch

from fastsim.batch_metrics import totals


class Panels:
    """Scores and score gradients, one block at a time.

    unit_x (N, D) and unit_y (M, D) are unit rows in the precision of the backend's operands. A
    block is (slice of rows, slice of columns). Gradients are in the compute type.
    """

    keeps_scores = False  # whether `forward` can keep scores for `score_grad`
    records_metrics = False  # whether the passes fill in `TileLoss.row_metrics`

    def number(self, scalar):
        """A 0-d tensor as the passes take it; here the tensor itself, which needs no waiting."""
        return scalar

    def multiply(self, left, right, out, *, accumulate):
        """out = left @ right, or with `accumulate` out += left @ right."""
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)

    def products(self, columns):
        """A function of rows (R, D) -> rows @ columns.T (R, M), for columns (M, D)."""
        return lambda rows: rows @ columns.t()

    def loss_scale(self, tile, weights, dtype, columns, coefficients=None):
        """A power of two () by which to multiply the weights of the losses, or None.

        It brings the score gradients of inputs of `dtype` into the range of the panel's dtype.
        Their bound is `Kind.largest_score_grad` of the weights or, where the coefficients are
        known, the closer `Kind.largest_of`.
        """
        return None

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        """The blocks to visit on a device.

        whole_rows: each block has all columns. lower: a block may leave out the columns before its
        first row.
        """
        raise NotImplementedError

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        """What the blocks of one pass reuse; it goes to `fused_pass` and `score_grad`.

        keep: the workspace goes to `forward` and then to `score_grad` of every block; for a backend
        with `keeps_scores`.
        """
        return None

    def whole_rows_fit(self, columns, device):
        """Whether a block on the device may hold whole rows of this many columns."""
        raise NotImplementedError

    def whole_matrix_fits(self, rows, columns, device):
        """Whether one block on the device may hold the whole matrix, so that `fused_pass` serves
        every kind of loss.
        """
        return False

    def forward(self, tile, unit_x, unit_y, *, workspace=None, sums=None):
        """The state of `tile` over the whole matrix: the tensors of `tile.parts`, in order.

        workspace: one made with `keep`; each block then goes to `score_grad` once.
        sums: the sums of each row over all columns, if the terms of a row need them
            (`tile.whole_rows`) and the columns here are only a part.
        """
        raise NotImplementedError

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        """(state, panel of score gradients) of a block of whole rows.

        weights: (N,) those of the losses. A loss with a state of the matrix gets None, or its loss
        scale (). For a loss with a state of columns the block is the whole matrix.
        """
        raise NotImplementedError

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        """The panel of score gradients dL/ds of a block, from the coefficients of `tile`."""
        raise NotImplementedError

    def mirrored(self, tile, unit, *, keep=False):
        """Passes over the scores of unit rows (N, D) with themselves, which use s_ij = s_ji.

        None if the backend has none or they are not faster. keep: as in `workspace`. The object
        returned has
            forward(): the state;
            gradient(coefficients, dtype): dL/dunit (N, D) in `dtype`, of rows plus columns.
        """
        return None

    def batch_totals(self, row_metrics, x, y):
        """The totals (len(TOTALS),) of one batch that `Metrics` adds up.

        row_metrics: as in `TileLoss`. x: (N, D), None if scores are not cosines. y: (M, D), None if
        it is x.
        """
        return totals(row_metrics, x, y, self.paired_cosines)

"""A loss summed over prefixes of the embeddings, in one sweep over their numbers."""


class Prefixes:
    """The terms: fastsim/engine/sweep.py."""

    def sweeps(self, tile, dtype, device):
        """Whether `sweep` serves a loss of inputs of this dtype."""
        return False

    def sweep_pays(self, rows, columns):
        """Whether a sweep over this many scores is faster than a loss for each width."""
        return True

    def prefix_rows(self, x, before):
        """(rows, norms) of x (N, d), the columns that a prefix adds to the next shorter one.

        before, norms: (N,) float64, the norms of the prefix without and with these columns.
        rows: x / norms, an operand as in `tile_rows`; zeros where the norm is 0 in the type of x.
        """
        raise NotImplementedError

    def prefix_rows_dots(self, grad_rows, x, inverse, dots):
        """Adds inverse * (x . grad_rows) of rows (N, d) to dots (N,); both (N,) in float64."""
        raise NotImplementedError

    def prefix_rows_backward(self, grad_rows, x, along, inverse, grad):
        """Writes inverse * (grad_rows - along * x) to grad (N, d); along, inverse (N,) float64."""
        raise NotImplementedError

    def sweep(self, tile, x, y, *, whole_rows, keep=False):
        """The panels of a sweep over prefixes x and y (`fastsim.engine.prefixes.Prefixes`).

        whole_rows: each block has all columns. keep: whether the products of forward() may be kept
        for score_grad(). What is returned has
            blocks(): the (rows, columns) slices to visit;
            forward(): the state of each width over the whole matrix;
            fused_pass(block, weights, products): the state of each width;
            coefficients(states, weights): what score gradients need of the states of all widths
                and the weights of their losses;
            score_grad(block, coefficients, products): the score gradients alone. They are as those
                of a backend, but that what they are given has the widths (K) before rows or
                columns. The score gradients of each width, with what the wider ones give to them,
                are added to its `fastsim.engine.call.Products`;
            row_dots (K - 1, N), column_dots (K - 1, M): of cosines, what the score gradients of
                the next wider prefix are to those of each, times its scores, summed, in float64.
        """
        raise NotImplementedError

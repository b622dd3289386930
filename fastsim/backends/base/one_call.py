"""A loss and its gradient in one call."""

from fastsim.backends import rows as formulas


class InOneCall:
    weighs_whole = False  # whether `whole` takes a weight for each row
    observes_whole = False  # whether `whole` looks at scores for `fastsim.metrics`
    checks_bias = False  # whether `whole` refuses a column bias that is not finite

    def serves_whole(self, tile, rows, columns, width, together, dtype):
        """Whether `whole` serves a loss over a matrix of that size, and pays.

        together: of rows with themselves. dtype: of the rows.
        """
        return False

    def sums_prefixes(self, tile, rows, columns, width, dtype):
        """Whether `whole` takes prefixes where it serves the loss."""
        return False

    def whole(self, tile, x, y, scale, bias, weights, wants, totals=None, prefixes=None):
        """The weighted sum of the losses of `tile` and its gradient, all in one call.

        x (N, D), y (M, D) or None: x with itself; scale and bias: numbers or 0-d tensors, in the
        place of those of the tile; weights: a number or () for all rows, with `weighs_whole` also
        (N,) in the compute type; `wants`: whether dL/dx and dL/dy are wanted, or None where no
        gradient is; totals: with `observes_whole`, where the `batch_totals` of this batch are
        written, in the place of `Tile.seen`; prefixes: with `sums_prefixes`, ascending widths to D
        and as many factors: the sum of the losses of so many first numbers of the rows, each times
        its factor.
        Returns loss () and, with `wants`, the tensors of which `whole_gradients` makes gradients.
        """
        raise NotImplementedError

    def whole_gradients(self, tile, grad, found, given, wants, dtype, *, spent=False):
        """dL/dx and dL/dy in `dtype` or the compute type, and (2,): dL/dscale and dL/dbias.

        grad: the gradient of what is made of the loss, (), or None for 1. found: what `whole` has
        returned beside the loss of `given`, its x, y, scale, bias and weights; here these gradients
        themselves, those of a side that is not wanted empty. wants: of x, y, scale, bias; what is
        not wanted is not read and may be None. spent: whether `found` may be overwritten.
        """
        return found if grad is None else formulas.multiplied(found, grad, wants, spent=spent)

    def serves_further(self, rows, columns, width, dtype):
        """Whether `further` serves so many scores, those of all parts, and pays."""
        return False

    def leaves_further(self, rows, columns, device):
        """Whether so many scores are left to the specification, which takes plain torch less time
        than a pass over the scores of each part.
        """
        return False

    def further(self, sides, directions, numbers, cosine, weights, wants, totals):
        """InfoNCE with further candidates or label smoothing, and its gradient, all in one call.

        sides: x (N, D), y (M, D), row i the positive of x_i, own negatives (N, K, D) or None,
        references (R, D) or None. directions: three bools, query_to_query, doc_to_query and
        doc_to_doc. numbers: scale, margin, label smoothing. weights: (N,) in the compute type, a
        number for all rows, or None. wants: whether the gradients of x, y and the own negatives are
        wanted. totals: as of `whole`, of x with y, or None.
        Returns the weighted sum of the losses (), of weights None the losses (N,), and the
        gradients in the compute type, None where not wanted.
        """
        raise NotImplementedError

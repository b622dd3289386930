"""A loss and its gradients in one call of the backend, without a loop over panels."""

from fastsim.backends import rows as formulas


class InOneCall:
    one_call_weighs_rows = False  # whether `in_one_call` takes one weight for each row
    one_call_records_metrics = False  # whether `in_one_call` fills in `fastsim.metrics`
    checks_bias = False  # whether `in_one_call` refuses a column bias that is not finite

    def serves_one_call(self, tile, rows, columns, width, self_similarity, dtype):
        """Whether `in_one_call` can compute a loss over a matrix of this size, and is faster.

        width: D. self_similarity: whether x is compared with itself. dtype: that of the rows.
        """
        return False

    def sums_prefixes(self, tile, rows, columns, width, dtype):
        """Whether `in_one_call`, where it serves the loss, also takes `prefixes`."""
        return False

    def in_one_call(self, tile, x, y, scale, bias, weights, needs_grad, totals=None, prefixes=None):
        """The weighted sum of the losses of `tile`, and its gradients.

        x: (N, D).
        y: (M, D), or None to compare x with itself.
        scale, bias: numbers or 0-d tensors; they replace those of the tile.
        weights: one number or () for all rows; with `one_call_weighs_rows` also (N,) in the compute
            type.
        needs_grad: which of dL/dx and dL/dy are needed; None if no gradient is.
        totals: memory for the `batch_totals` of this batch, in place of `TileLoss.row_metrics`;
            only with `one_call_records_metrics`.
        prefixes: (widths, factors), widths ascending up to D. The result is then
            sum_k factors_k loss(x[:, :widths_k], y[:, :widths_k]); only with `sums_prefixes`.
        Returns the loss () and, with `needs_grad`, the tensors from which `one_call_gradients`
        makes the gradients.
        """
        raise NotImplementedError

    def one_call_gradients(self, tile, grad, found, given, needs_grad, dtype, *, spent=False):
        """dL/dx and dL/dy in `dtype` or the compute type, and (dL/dscale, dL/dbias) as (2,).

        grad: the gradient () with respect to the loss; None means 1.
        found: the tensors that `in_one_call` returned after the loss. Here they are the gradients
            themselves, empty for a side that needs none.
        given: x, y, scale, bias and weights of that call; what needs no gradient may be None.
        needs_grad: which of x, y, scale and bias need a gradient.
        spent: whether `found` may be overwritten.
        """
        if grad is None:
            return found
        return formulas.multiplied(found, grad, formulas.parts_needed(needs_grad), spent=spent)

    def serves_further(self, rows, columns, width, dtype, directions):
        """Whether `further` can compute this many scores, all parts together, and is faster.

        directions: as for `further`.
        """
        return False

    def leaves_further(self, rows, columns, device):
        """Whether the dense formula in plain torch is faster for this many scores than one pass
        over the scores of each part.
        """
        return False

    def further(self, tile, sides, directions, scale, weights, needs_grad, totals):
        """InfoNCE with further candidates or label smoothing, and its gradients.

        tile: the softmax over the candidates. Its pairs have positives; a guide comes without
            thresholds. With label smoothing every candidate has a target.
        sides: x (N, D); y (M, D); own negatives (N, K, D) or None; references (R, D) or None.
        directions: three bools: query_to_query, doc_to_query, doc_to_doc. With any of them the
            positive of x_i is row i of y, and no pair is left out or biased.
        scale: a number or a 0-d tensor.
        weights: (N,) in the compute type, one number for all rows, or None.
        needs_grad: which of x, y, the own negatives and scale need a gradient.
        totals: as in `in_one_call`, for the scores of x with y, or None.
        Returns the weighted sum of the losses (), or the losses (N,) if weights is None; and the
        gradients of x, y and the own negatives in the compute type, and (dL/dscale, 0) as (2,).
        Those that are not needed may be None.
        """
        raise NotImplementedError

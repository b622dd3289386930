"""Scores and distances of paired rows, without a matrix of all pairs."""

import torch

from fastsim.backends import rows as formulas
from fastsim.precision import compute_dtype


class PairedRows:
    def paired_cosines(self, x, y):
        """(cosines (N,) of paired rows, inverse norms (2, N) of x and y) in the compute type."""
        dtype = compute_dtype(x)
        (unit_x, inverse_x), (unit_y, inverse_y) = (self.unit_rows(t, dtype) for t in (x, y))
        return (unit_x * unit_y).sum(1), torch.stack([inverse_x, inverse_y])

    def paired_squared_errors(self, x, y, targets, factor):
        """`factor` times the sum of the squared differences of cosines and targets (N,)."""
        cosines, _ = self.paired_cosines(x, y)
        return factor * (cosines - targets.to(cosines.dtype)).square().sum()

    def paired_cosines_backward(self, grad, x, y, cosines, inverse, needs_grad):
        """(dL/dx, dL/dy) in the dtypes of x and y, from dL/dcosines; empty where not needed."""
        one = inverse.new_ones(())

        def side(wanted, own, own_inverse, other, other_inverse):
            if not wanted:
                return own.new_empty(0)
            grad_unit = ((grad * other_inverse)[:, None] * other).contiguous()
            return self.unit_rows_backward(grad_unit, own, own_inverse, one, own.dtype)[0]

        of_x, of_y = (x, inverse[0]), (y, inverse[1])
        return side(needs_grad[0], *of_x, *of_y), side(needs_grad[1], *of_y, *of_x)

    def paired_scores(self, unit_x, unit_y):
        """Scores (N,) of paired rows by the same products as the panels, so that equal rows tie."""
        raise NotImplementedError

    def positive_scores(self, pairs, unit_x, unit_y):
        """The score (N,) of each row's positive, as in `paired_scores`."""
        return self.paired_scores(unit_x, unit_y[pairs.positives])

    def triplet_distances(self, anchors, positives, negatives):
        """|a_i - p_i| and |a_i - n_i|, (N,) in the compute type, from three tensors (N, D)."""
        return formulas.triplet_distances(anchors, positives, negatives)

    def triplet_losses(self, anchors, positives, negatives, margin, factor):
        """(near, far, losses): `triplet_distances` and relu(near - far + margin) (N,).

        margin: a number. A loss is NaN where a_i - n_i is not finite.
        factor: None, or a number; losses is then factor times their sum ().
        """
        near, far = self.triplet_distances(anchors, positives, negatives)
        losses = formulas.triplet_losses(near, far, margin)
        return near, far, losses if factor is None else factor * losses.sum()

    def triplet_losses_backward(
        self, grad, anchors, positives, negatives, near, far, *, needs_grad, margin, factor
    ):
        """The gradients of the three, None where not needed, from that of `triplet_losses`."""
        grad = formulas.gap_gradients(grad, near, far, margin, factor)
        sides = anchors, positives, negatives
        return self.triplet_distances_backward(grad, *sides, near, far, needs_grad)

    def triplet_distances_backward(
        self, grad, anchors, positives, negatives, near, far, needs_grad
    ):
        """The gradients of the three, None where not needed, from dL/dnear = -dL/dfar (N,).

        The gradient of a distance of 0 is 0.
        """
        sides = anchors, positives, negatives
        return formulas.triplet_distances_backward(grad, *sides, near, far, needs_grad)

    def chosen_rows(self, x, y, columns, distances, missing):
        """x_i . y_j, or with `distances` |x_i - y_j|, as (K, N) with j = columns[k, i].

        y: None for x itself. missing: K numbers, the values where the column is negative.
        """
        return formulas.chosen_rows(x, y, columns, distances, missing)

    def chosen_rows_backward(self, grad, values, x, y, columns, distances, needs_grad):
        """dL/dx and dL/dy, None where not needed, from dL/dvalues; without y the first is the sum.

        The gradient of a distance of 0 is 0.
        """
        return formulas.chosen_rows_backward(grad, values, x, y, columns, distances, needs_grad)

    def row_terms(self, x, y, columns, first):
        """((x_i . y_{first + i}, x_i . y_columns[i]) (2, N), x_i . sum_j y_j (N,)).

        The score of a negative column is 0.
        """
        return formulas.row_terms(x, y, columns, first)

    def row_terms_backward(self, grad_pairs, grad_sums, x, y, columns, first, needs_grad):
        """dL/dx and dL/dy, None where not needed."""
        return formulas.row_terms_backward(grad_pairs, grad_sums, x, y, columns, first, needs_grad)

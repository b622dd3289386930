"""One call of an operator, and the matrix products with its score gradients."""

from dataclasses import replace

from fastsim.backends import get
from fastsim.batch_metrics import empty_row_metrics
from fastsim.engine.scoring import common_loss_scale, scaled_coefficients
from fastsim.pairs import part_of, with_thresholds, with_unit_rows
from fastsim.precision import compute_dtype, widened


class Call:
    """One call of an operator. fake: the tensors hold no values (`FakeTensor`)."""

    def __init__(self, arguments, *, fake=False):
        self.arguments = arguments
        self.x, self.weights, self.needs_grad = arguments.x, arguments.weights, arguments.needs_grad
        self.self_similarity = arguments.y is None
        self.y = self.x if self.self_similarity else arguments.y
        self.scale = arguments.scale
        self.backend = get(arguments.backend)
        self.tile = arguments.tile((lambda scalar: scalar) if fake else self.backend.number)
        self.row_metrics = None
        if arguments.with_metrics and not fake:
            self.row_metrics = empty_row_metrics(self.x.shape[0], self.x.device)

    def weigh_rows(self):
        """Expands one weight for all rows to one for each row, which the passes need."""
        if self.weights is not None and not self.weights.ndim:
            self.weights = self.weights.expand(self.x.shape[0]).contiguous()

    @property
    def first_look(self):
        """The tile for the pass that computes every score first; it also counts the metrics."""
        return (
            self.tile
            if self.row_metrics is None
            else replace(self.tile, row_metrics=self.row_metrics)
        )

    @property
    def products(self):
        """`products_needed` of this call."""
        return products_needed(self.needs_grad, self.self_similarity)

    def with_loss_scale(self, weights):
        """(weights times a loss scale, the factor that removes it from the gradients)."""
        loss_scale = common_loss_scale(
            self.tile, weights, self.x.dtype, self.y.shape[0], self.backend, self.tile.group
        )
        if loss_scale is None:
            return weights, self._no_factor()
        return loss_scale if weights is None else weights * loss_scale, 1 / loss_scale

    def coefficients(self, state, weights, dtype):
        """(coefficients in `dtype` times a loss scale, the factor that removes it).

        The coefficients are those of the losses times `weights`; None means 1.
        """
        weights = 1.0 if weights is None else widened(weights)
        given = self.tile, state, weights, self.x.dtype, self.y.shape[0], self.backend
        found, loss_scale = scaled_coefficients(*given, self.tile.group)
        found = [c if c is None else c.to(dtype) for c in found]
        return found, self._no_factor() if loss_scale is None else 1 / loss_scale

    def _no_factor(self):
        return self.x.new_ones((), dtype=compute_dtype(self.x))

    def units(self):
        """(unit_x, unit_y, inverse_x, inverse_y): unit rows and inverse norms of both sides.

        inverse_y is empty if y is x. For dot products the rows stay as they are
        (`Backend.dot_rows`), and each side gets the scale of the other, which its gradient has.
        Also prepares the pairs: unit rows of a guide and of a teacher, whose scores are always
        cosines, and thresholds for `exclude_above`.
        """
        prepare = self.backend.tile_rows if self.tile.cosine else self.backend.dot_rows
        unit_x, inverse_x = prepare(self.x)
        if self.self_similarity:
            unit_y, inverse_y = unit_x, inverse_x.new_empty(0)
        else:
            unit_y, inverse_y = prepare(self.y)
            if not self.tile.cosine:
                inverse_x, inverse_y = inverse_y, inverse_x
        pairs = with_unit_rows(self.tile.pairs, self.backend)
        if pairs.exclude_above is not None:
            pairs = with_thresholds(pairs, unit_x, unit_y, self.backend)
        self.tile = replace(self.tile, pairs=pairs)
        return unit_x, unit_y, inverse_x, inverse_y


class Products:
    """dL/dunit_x and dL/dunit_y, summed over panels of score gradients; empty where not needed.

    spent: whether dL/dunit_x may overwrite unit_x. It may if no later panel of the band reads these
    rows, and saves memory for N x D numbers.
    """

    def __init__(self, call, unit_x, unit_y, dtype, *, spent):
        self.multiply = call.backend.multiply
        self.self_similarity = call.self_similarity
        self.unit_x, self.unit_y = unit_x, unit_y
        want_x, want_y = call.products
        self.needs_grad = want_x, want_y or (want_x and call.self_similarity)
        fits = unit_x.dtype == dtype and unit_x.is_contiguous()
        if want_x and spent and fits and not call.self_similarity:
            self.grad_x = unit_x
        else:
            self.grad_x = self._memory(call, unit_x, want_x, dtype)
        self.grad_y = self._memory(call, unit_y, self.needs_grad[1], dtype)
        if not len(unit_x):  # one rank of a group; else the first band of rows writes it
            self.grad_y.zero_()
        self.row_begun = -1

    @staticmethod
    def _memory(call, rows, wanted, dtype):
        if not wanted:
            return rows.new_empty(0, dtype=dtype)
        return call.backend.gradient_rows(rows, dtype)

    def add(self, panel, block):
        rows, columns = block
        # First y: the product for x may overwrite the unit rows that this one reads.
        if self.needs_grad[1]:
            out = part_of(self.grad_y, columns)
            self.multiply(panel.t(), part_of(self.unit_x, rows), out, accumulate=rows.start > 0)
        if self.needs_grad[0]:
            begun = rows.start == self.row_begun
            others, out = part_of(self.unit_y, columns), part_of(self.grad_x, rows)
            self.multiply(panel, others, out, accumulate=begun)
            self.row_begun = rows.start

    def result(self):
        if self.self_similarity and self.needs_grad[0]:
            return self.grad_x.add_(self.grad_y), self.grad_y.new_empty(0)
        return self.grad_x, self.grad_y


def products_needed(needs_grad, self_similarity):
    """Which gradients of unit rows are computed: (of x, of y).

    If x is compared with itself, that of x holds the sum of both.
    """
    want_x, want_y, want_scale, _ = needs_grad
    if self_similarity:
        return want_x or want_scale, False
    # dL/dscale = sum_i unit_x_i . dL/dunit_x_i / scale, and the same with y: one side is needed.
    return want_x or (want_scale and not want_y), want_y

"""One operator call, and the products of its score gradients."""

from dataclasses import replace

from fastsim.backends import get
from fastsim.batch_metrics import nothing_seen
from fastsim.engine.scoring import common_loss_scale, scaled_coefficients
from fastsim.pairs import part_of, with_thresholds, with_unit_rows
from fastsim.precision import widened
from fastsim.scores import compute_dtype


class Call:
    """One operator call; `fake`: the tensors of the `TileArguments` hold no values."""

    def __init__(self, arguments, *, fake=False):
        self.arguments = arguments
        self.x, self.weights, self.wants = arguments.x, arguments.weights, arguments.wants
        self.together = arguments.y is None
        self.y = self.x if self.together else arguments.y
        self.scale = arguments.scale
        self.backend = get(arguments.backend)
        self.tile = arguments.tile((lambda scalar: scalar) if fake else self.backend.number)
        self.seen = None
        if arguments.observed and not fake:
            self.seen = nothing_seen(self.x.shape[0], self.x.device)

    def weigh_rows(self):
        """One weight for all rows becomes one of each, as the passes take them."""
        if self.weights is not None and not self.weights.ndim:
            self.weights = self.weights.expand(self.x.shape[0]).contiguous()

    @property
    def first_look(self):
        """The tile of what looks at every score first, and once."""
        return self.tile if self.seen is None else replace(self.tile, seen=self.seen)

    @property
    def products(self):
        """Which gradients of unit rows are computed: (x, y); together, x's holds both shares."""
        return products_wanted(self.wants, self.together)

    def with_loss_scale(self, weights):
        """(weights, the factor that takes their loss scale back out of the gradient)."""
        loss_scale = common_loss_scale(
            self.tile, weights, self.x.dtype, self.y.shape[0], self.backend, self.tile.group
        )
        if loss_scale is None:
            return weights, self._no_factor()
        return loss_scale if weights is None else weights * loss_scale, 1 / loss_scale

    def coefficients(self, state, weights, dtype):
        """(the coefficients in `dtype` for losses so weighted, with a loss scale; the factor that
        takes it back out).
        """
        weights = 1.0 if weights is None else widened(weights)
        given = self.tile, state, weights, self.x.dtype, self.y.shape[0], self.backend
        found, loss_scale = scaled_coefficients(*given, self.tile.group)
        found = [c if c is None else c.to(dtype) for c in found]
        return found, self._no_factor() if loss_scale is None else 1 / loss_scale

    def _no_factor(self):
        return self.x.new_ones((), dtype=compute_dtype(self.x))

    def units(self):
        """Unit rows and inverse norms of both sides; y's norms are empty where y is x.

        Where the scores are no cosines the rows are as they came (`Backend.dot_rows`), and each
        side has the size of the other, of which its gradient is made.
        A guide's and a teacher's embeddings are cosines' in any case, and `exclude_above` becomes
        thresholds.
        """
        prepare = self.backend.tile_rows if self.tile.cosine else self.backend.dot_rows
        unit_x, inverse_x = prepare(self.x)
        if self.together:
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
    """dunit_x and dunit_y, summed over score gradient panels; empty where not wanted.

    spent: whether dunit_x may overwrite the unit rows of x, which no later panel of the band reads;
    N x D numbers fewer are then alive.
    """

    def __init__(self, call, unit_x, unit_y, dtype, *, spent):
        self.multiply = call.backend.multiply
        self.together = call.together
        self.unit_x, self.unit_y = unit_x, unit_y
        want_x, want_y = call.products
        self.wants = want_x, want_y or (want_x and call.together)
        fits = unit_x.dtype == dtype and unit_x.is_contiguous()
        if want_x and spent and fits and not call.together:
            self.grad_x = unit_x
        else:
            self.grad_x = self._memory(call, unit_x, want_x, dtype)
        self.grad_y = self._memory(call, unit_y, self.wants[1], dtype)
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
        # That of y first: the other may write over the unit rows that it reads.
        if self.wants[1]:
            out = part_of(self.grad_y, columns)
            self.multiply(panel.t(), part_of(self.unit_x, rows), out, accumulate=rows.start > 0)
        if self.wants[0]:
            begun = rows.start == self.row_begun
            others, out = part_of(self.unit_y, columns), part_of(self.grad_x, rows)
            self.multiply(panel, others, out, accumulate=begun)
            self.row_begun = rows.start

    def result(self):
        if self.together and self.wants[0]:
            return self.grad_x.add_(self.grad_y), self.grad_y.new_empty(0)
        return self.grad_x, self.grad_y


def products_wanted(wants, together):
    """Which gradients of unit rows are computed: (x, y); together, x's holds both shares."""
    want_x, want_y, want_scale, _ = wants
    if together:
        return want_x or want_scale, False
    # The scale's gradient is sum_i unit_x . dunit_x / scale, so one side has to be there.
    return want_x or (want_scale and not want_y), want_y

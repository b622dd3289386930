"""What a backend offers the engine."""

import torch

from fastsim.backends import rows as formulas
from fastsim.backends.extras import EXTRAS
from fastsim.batch_metrics import totals


class Backend:
    """One way to run the passes of the engine.

    Shapes: unit_x (N, D) and unit_y (M, D) are unit rows in the backend's operand precision; a
    block is a slice of rows against a slice of columns; gradients come out in the compute type.
    """

    name: str
    automatic = True  # whether `auto` may choose it
    by_verdict = False  # whether `auto` may where a verdict calls it right (fastsim/verify)
    extras = frozenset()  # what it does of what not every backend does with a tile loss (EXTRAS)
    # Distinct targets up to which sums per level are cheaper than a sort of all entries.
    most_levels = 256
    weighs_whole = False  # whether `whole` takes a weight for each row
    observes_whole = False  # whether `whole` looks at scores for `fastsim.metrics`
    keeps_scores = False  # whether `forward` leaves scores for the score gradients that follow it
    observes = False  # whether it looks at scores for `fastsim.metrics`, where `Tile.seen` is given

    def unsupported_reason(self, *tensors, kind=None):
        """None if these tensors can be served (no tensors: if the machine can), else a sentence.

        kind: what is to be done with their scores, a name of `fastsim.kinds`: of
            `KINDS`, `SELECTIONS` or `LATE_INTERACTION`.
        """
        raise NotImplementedError

    def kinds(self):
        """The names of `KINDS`, `SELECTIONS` and `LATE_INTERACTION` that it has kernels for."""
        raise NotImplementedError

    def unsupported_kind(self, kind):
        """None if it serves that kind, or if None is asked for; else a sentence."""
        if kind is None or kind in self.kinds():
            return None
        return f"it has no kernels of kind {kind!r}"

    def unsupported_extra(self, extras):
        """None if it has all of these extras (EXTRAS), else a sentence."""
        return next((EXTRAS[extra] for extra in extras if extra not in self.extras), None)

    def note(self):
        """What `fastsim info` adds to "usable"."""
        return ""

    def number(self, scalar):
        """A 0-d tensor as the passes take it: itself, so that no device has to be waited for."""
        return scalar

    def multiply(self, left, right, out, *, accumulate):
        """out = left @ right, or added to it."""
        if accumulate:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)

    def loss_scale(self, tile, weights, dtype, columns):
        """A power of two () by which to multiply the weights of the losses, or None.

        It brings the score gradients into the range of the panel's type, for inputs of `dtype`
        (`Kind.largest_score_grad` bounds them).
        """
        return None

    def unit_rows(self, x, dtype=None):
        """(unit (N, D), inverse norms (N,)); a zero row stays zero with inverse norm 0.

        `dtype` of the unit rows: None for the backend's operand precision.
        """
        raise NotImplementedError

    def scored_rows(self, x):
        """Unit rows that only the backend makes scores of: those of a guide or a teacher.

        They need slices of rows, a shape, a dtype and a device, no more.
        """
        return self.unit_rows(x)[0]

    def tile_rows(self, x):
        """`unit_rows` for the passes over panels alone, which hand them back to the backend.

        They need a shape, a dtype, a device, `new_empty` and slices of rows, no more.
        """
        return self.unit_rows(x)

    def operand(self, unit, dtype):
        """Unit rows of the compute type in the operand precision for inputs of `dtype`."""
        return unit

    def unit_rows_backward(self, grad_unit, x, inverse, factor, dtype):
        """(factor * dL/dx in `dtype`, unit . grad_unit (N,)) from dL/dunit; factor is 0-d."""
        raise NotImplementedError

    def gradient_rows(self, rows, dtype):
        """Memory for what `multiply` makes of panels and other rows, of the size of `rows`."""
        return rows.new_empty(rows.shape, dtype=dtype)

    def tile_rows_backward(self, grad_rows, x, inverse, factor, dtype):
        """`unit_rows_backward` from what `multiply` made of panels and `tile_rows`.

        The result may take the place of `grad_rows`.
        """
        return self.unit_rows_backward(grad_rows, x, inverse, factor, dtype)

    def paired_cosines(self, x, y):
        """(cosines (N,) of paired rows, inverse norms (2, N) of x and y) in the compute type."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        (unit_x, inverse_x), (unit_y, inverse_y) = (self.unit_rows(t, dtype) for t in (x, y))
        return (unit_x * unit_y).sum(1), torch.stack([inverse_x, inverse_y])

    def paired_cosines_backward(self, grad, x, y, cosines, inverse, wants):
        """(dL/dx, dL/dy), each in its input's dtype, from dL/dcosines; empty where not wanted."""
        one = inverse.new_ones(())

        def side(wanted, own, own_inverse, other, other_inverse):
            if not wanted:
                return own.new_empty(0)
            grad_unit = (grad * other_inverse)[:, None] * other
            return self.unit_rows_backward(grad_unit, own, own_inverse, one, own.dtype)[0]

        of_x, of_y = (x, inverse[0]), (y, inverse[1])
        return side(wants[0], *of_x, *of_y), side(wants[1], *of_y, *of_x)

    def sweeps(self, tile, dtype, device):
        """Whether `sweep` serves a loss of inputs of that dtype."""
        return False

    def sweep_pays(self, rows, columns):
        """Whether a sweep over so many scores is faster than a loss of each width."""
        return True

    def prefix_rows(self, x, before):
        """Columns x (N, d) of rows whose norms without them are `before` (N,), float64.

        (x over the rows' norms, an operand as `tile_rows` makes them; the norms, float64). A row
        of norm 0, in the type of x, is zeros.
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
                are added to its `fastsim.engine.passes.Products`;
            row_dots (K - 1, N), column_dots (K - 1, M): of cosines, what the score gradients of
                the next wider prefix are to those of each, times its scores, summed, in float64.
        """
        raise NotImplementedError

    def mirrored(self, tile, unit, *, keep=False):
        """The passes of a loss of rows against themselves that compute each score for two pairs.

        None where the backend has none, or they do not pay. keep: as of `workspace`. What is
        returned has
            forward(): the state;
            gradient(coefficients, dtype): dL/dunit (N, D) in `dtype`, of rows and columns.
        """
        return None

    def serves_whole(self, tile, rows, columns, width, together):
        """Whether `whole` serves a loss over a matrix of that size, and pays.

        together: of rows with themselves.
        """
        return False

    def whole(self, tile, x, y, scale, bias, weights, wants, totals=None):
        """The weighted sum of the losses of `tile` and its gradient, all in one call.

        x (N, D), y (M, D) or None: x with itself; scale and bias: numbers or 0-d tensors, in the
        place of those of the tile; weights: a number or () for all rows, with `weighs_whole` also
        (N,) in the compute type; `wants`: whether dL/dx and dL/dy are wanted, or None where no
        gradient is; totals: with `observes_whole`, where the `batch_totals` of this batch are
        written, in the place of `Tile.seen`.
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

    def serves_further(self, rows, columns, width):
        """Whether `further` serves so many scores, those of all parts, and pays."""
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

    def operand_rows(self, x, cosine):
        """`unit_rows`, or `plain_rows` where the scores are no cosines."""
        return self.unit_rows(x) if cosine else self.plain_rows(x)

    def plain_rows(self, x):
        """`unit_rows` for scores that are no cosines: a copy of x as operands, and ones."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = torch.empty(x.shape, dtype=dtype, device=x.device)
        # float16, the operand of 16-bit inputs, has not the range of bfloat16.
        kind = dtype if x.dtype == torch.bfloat16 else x.dtype
        return self.operand(rows.copy_(x), kind), rows.new_ones(x.shape[0])

    def plain_rows_backward(self, grad_rows, x, inverse, factor, dtype):
        """(factor * dL/dx in `dtype`, x . grad_rows (N,)), as `unit_rows_backward`."""
        return (factor * grad_rows).to(dtype), (x * grad_rows).sum(1)

    def blocks(self, rows, columns, device, *, whole_rows=False, lower=False):
        """The (rows, columns) slices to visit on a device; `whole_rows`: each has all columns.

        `lower`: blocks may leave out columns up to their first row.
        """
        raise NotImplementedError

    def workspace(self, unit_x, unit_y, *, whole_rows=False, keep=False):
        """Whatever the blocks of one pass reuse, handed back to `fused_pass` and `score_grad`.

        `keep`: of a forward reduction and of the score gradients of all blocks after it, of a
        backend that keeps scores.
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

        workspace: made to keep scores, of a backend that does; for each block to be handed to
        `score_grad` once. sums: where the terms of a row want the sum over all of it
        (`tile.whole_rows`) and these columns are not all of it, the parts of the state before them
        over all.
        """
        raise NotImplementedError

    def fused_pass(self, tile, unit_x, unit_y, block, weights, workspace):
        """(state, score gradient panel) of a block of whole rows; `weights` (N,) weigh the losses.

        A loss that looks at columns too comes with a block of the whole matrix only; one of the
        whole matrix with weights None, or with its loss scale () alone.
        """
        raise NotImplementedError

    def score_grad(self, tile, unit_x, unit_y, block, coefficients, workspace):
        """The score gradient panel dL/dS of a block from the coefficients of `tile`."""
        raise NotImplementedError

    def batch_totals(self, seen, x, y):
        """What `Metrics` add up (len(TOTALS),) of `Tile.seen` and of the rows themselves.

        x (N, D), None where scores are no cosines; y (M, D), None where it is x.
        """
        return totals(seen, x, y, self.paired_cosines)

    def paired_scores(self, unit_x, unit_y):
        """Scores (N,) of paired rows by the same products as the panels, so that equal rows tie."""
        raise NotImplementedError

    def positive_scores(self, pairs, unit_x, unit_y):
        """Score (N,) of each row's positive, as `paired_scores`."""
        return self.paired_scores(unit_x, unit_y[pairs.positives])

    def closest(self, pairs, semi_hard, unit_x, unit_y, ceilings=None, seen=None):
        """Column (N,) int64 of each row's closest negative, -1 where it has none.

        ceilings (N,): the positives' scores, where positives are not among these columns. seen: as
        `Tile.seen`.
        """
        raise NotImplementedError

    def hardest(self, pairs, offsets, x, y):
        """Columns ((N,), (N,)) int64 of each row's hardest positive and hardest negative.

        The lowest score x_i . y_j - offsets_j of the row's group and the highest of any other,
        -1 where there is none; `offsets` (M,) may be None.
        """
        raise NotImplementedError

    def serves_hardest_pairs(self, rows, width):
        """Whether `hardest_pairs` serves so many rows of that width, and pays."""
        return False

    def hardest_pairs(self, x, groups):
        """(columns, distances, largest): of rows x (N, D) in the compute type against each other.

        columns (2, N): as `hardest`, of Euclidean distances; distances (2, N): of each row to
        these, -inf and inf where there is none; largest (): as of `centred`.
        """
        raise NotImplementedError

    def equal_counts(self, values, among):
        """How many of the integers among (M,) each of the integers values (N,) is: (N,) int64."""
        return formulas.equal_counts(values, among)

    def triplet_distances(self, anchors, positives, negatives):
        """|a_i - p_i| and |a_i - n_i| (N,) in the compute type, of three (N, D)."""
        return formulas.triplet_distances(anchors, positives, negatives)

    def triplet_losses(self, anchors, positives, negatives, margin):
        """`triplet_distances`, and relu(|a_i - p_i| - |a_i - n_i| + margin) (N,) of a number."""
        near, far = self.triplet_distances(anchors, positives, negatives)
        return near, far, formulas.triplet_losses(near, far, margin)

    def triplet_distances_backward(self, grad, anchors, positives, negatives, near, far, wants):
        """The gradients of the three, None where not wanted, from dL/dnear = -dL/dfar (N,).

        At distance 0 that of the distance is 0.
        """
        sides = anchors, positives, negatives
        return formulas.triplet_distances_backward(grad, *sides, near, far, wants)

    def centred(self, x, y):
        """Rows between which products tell the distances: x_i . y_j - |y_j|^2 / 2 falls with them.

        x (N, D), y (M, D) or None: x itself, in the compute type. Returns both relative to the
        centre of y, which changes no distance and makes the products small, in units of the
        largest norm, which keeps them away from the ends of the range; the halved squares of the
        norms of y's (M,) in these units; and that largest norm (), not finite if any number is not.
        """
        return formulas.centred(x, y)

    def chosen_rows(self, x, y, columns, distances, missing):
        """x_i . y_j, or with `distances` |x_i - y_j|, (K, N) for j = columns[k, i].

        y: None for x itself. missing: K numbers, the values where the column is negative.
        """
        return formulas.chosen_rows(x, y, columns, distances, missing)

    def chosen_rows_backward(self, grad, values, x, y, columns, distances, wants):
        """dL/dx and dL/dy, None where not wanted, from dL/dvalues; without y the first has both.

        At distance 0 the gradient of a distance is 0.
        """
        return formulas.chosen_rows_backward(grad, values, x, y, columns, distances, wants)

    def row_terms(self, x, y, columns, first):
        """(x_i . y_{first + i}, x_i . y_columns[i]) (2, N), 0 for a negative column, and
        x_i . sum_j y_j (N,).
        """
        return formulas.row_terms(x, y, columns, first)

    def row_terms_backward(self, grad_pairs, grad_sums, x, y, columns, first, wants):
        """dL/dx and dL/dy, None where not wanted."""
        return formulas.row_terms_backward(grad_pairs, grad_sums, x, y, columns, first, wants)

    def max_sim(self, x, y, cosine, own, scores, places):
        """Writes MaxSim scores (B, K) of queries x and documents y (`fastsim.tokens.Tokens`).

        own: the documents are of one query each, else every query meets all. places (K, P), or
        None: the token of the document that each query token chose, the first of equals, -1 where
        a mask or an empty document leaves none.
        """
        raise NotImplementedError

    def max_sim_backward(self, grad, places, x, y, cosine, own, wants):
        """Gradients of the rows of x and y, None where not wanted, from dL/dscores (B, K)."""
        raise NotImplementedError

    def top_k(self, queries, corpus, k):
        """(values (N, k) descending, indices (N, k)) of the cosines."""
        raise NotImplementedError

    def cosent(self, scores, labels, scale, want_score_grad):
        """(loss (), dL/dscore (M,) or None) of CoSENT over a list of scores."""
        raise NotImplementedError

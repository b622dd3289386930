"""Losses whose columns travel from rank to rank instead of being gathered.

At step k a rank holds the columns of the rank k places after it. The state of these columns, or
their gradient, travels with them; after as many steps as there are ranks it is back on the rank
that the columns belong to. Rows and their state stay. The forward pass is one round (two if the
terms of a row need its sums first), and so is the backward pass.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from fastsim.autocast import without_autocast
from fastsim.engine.scoring import blocks_of, scaled_coefficients, state_of
from fastsim.engine.selection import hardest_columns, selected_rows
from fastsim.kinds.kind import COLUMNS, MATRIX
from fastsim.operators import once_differentiable
from fastsim.pairs import with_thresholds, with_unit_rows
from fastsim.precision import widened


def travel(batch, lent, home=()):
    """One round of the columns of all ranks: yields (slice of the columns, their `lent` tensors).

    lent: tensors (M_rank, ...) of this rank's columns, which every rank reads.
    home: a `Home`, tensors of this rank's columns that every rank may replace; or ().

    Ranks without columns are skipped.
    """
    for step in range(batch.ranks):
        source = (batch.rank + step) % batch.ranks
        first = sum(batch.column_counts[:source])
        # Tensors that are only read are sent on while this rank works on them; at the last step
        # nobody needs them any more.
        leaving = lent if step < batch.ranks - 1 else []
        arrive = _pass_on(batch, leaving, source, tag=0)
        if batch.column_counts[source]:
            yield slice(first, first + batch.column_counts[source]), lent
        lent = arrive()
        if home:
            home.leave(batch, source, tag=len(leaving))
    if home:
        home.arrive()


class Home:
    """Tensors that belong to columns and travel with them; after a round they are back home.

    They are sent while the rank works on the next columns; `arrive` waits for them.
    """

    def __init__(self, tensors=()):
        self.tensors = list(tensors)
        self._coming = None

    def __bool__(self):
        return bool(self.tensors) or self._coming is not None

    def leave(self, batch, source, tag):
        """Starts to send the tensors on; they belong to the columns of rank `source`."""
        self._coming = _pass_on(batch, self.arrive(), source, tag)
        self.tensors = []

    def arrive(self):
        """Waits for the tensors of the columns that are here now, and returns them."""
        if self._coming is not None:
            self.tensors, self._coming = self._coming(), None
        return self.tensors


def _pass_on(batch, tensors, source, tag):
    """Starts to send tensors of the columns of `source` on, and to receive the next ones.

    Returns a function that waits for the next ones and returns them.
    """
    if batch.ranks == 1 or not tensors:
        return lambda: list(tensors)
    before, after = (
        dist.get_global_rank(batch.group, (batch.rank + step) % batch.ranks) for step in (-1, 1)
    )
    count = batch.column_counts[(source + 1) % batch.ranks]
    sent = [tensor.contiguous() for tensor in tensors]
    received = [tensor.new_empty(count, *tensor.shape[1:]) for tensor in tensors]
    operations = []
    for number, (mine, theirs) in enumerate(zip(sent, received, strict=True), start=tag):
        if len(mine):
            operations.append(dist.P2POp(dist.isend, mine, before, batch.group, number))
        if count:
            operations.append(dist.P2POp(dist.irecv, theirs, after, batch.group, number))
    requests = dist.batch_isend_irecv(operations) if operations else []

    def arrive():
        for request in requests:
            request.wait()
        sent.clear()  # the memory must live until the requests are done
        return received

    return arrive


# ---- tile losses ----


def ring_tile_loss(tile, x, y, scale, bias, weights, batch, backend):
    """`tile_loss` (autograd.py) with columns y (M_rank, D) that travel from rank to rank.

    scale, bias: 0-d tensors.
    """
    weights = weights if weights is None else weights.expand(len(x))
    return _RingTile.apply(x, y, scale, bias, weights, tile, batch, backend)


class _RingTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, scale, bias, weights, tile, batch, backend):
        tile = replace(tile, scale=backend.number(scale), bias=backend.number(bias))
        with without_autocast(x.device.type):
            state = _forward(tile, x, y, batch, backend)
            loss = _own(tile, batch).finish(state)
        ctx.save_for_backward(x, y, scale, weights, *state)
        ctx.call = replace(tile, row_metrics=None), batch, backend
        return (loss if weights is None else (loss * weights).sum()).to(tile.loss_dtype(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, y, scale, weights, *state = ctx.saved_tensors
        tile, batch, backend = ctx.call
        own = _own(tile, batch)
        grad_losses = widened(tile.own_gradient(grad if weights is None else grad * weights))
        # All ranks need one loss scale, as each adds to the gradients that travel.
        arguments = own, state, grad_losses, x.dtype, batch.columns, backend, batch.name
        coefficients, loss_scale = scaled_coefficients(*arguments)
        coefficients = [c if c is None else c.to(scale.dtype) for c in coefficients]
        loss_scale = scale.new_ones(()) if loss_scale is None else loss_scale
        needs_grad = ctx.needs_input_grad
        grads = [None] * len(needs_grad)
        with without_autocast(x.device.type):
            # dL/dscale = sum_i unit_x_i . dL/dunit_x_i / scale
            needed_sides = needs_grad[0] or needs_grad[2], needs_grad[1]
            unit_grads = _score_grads(tile, x, y, coefficients, needed_sides, batch, backend)
            grads[0], dots = _through_rows(unit_grads[0], x, loss_scale, tile.cosine, backend)
            grads[1], _ = _through_rows(unit_grads[1], y, loss_scale, tile.cosine, backend)
        if needs_grad[2]:
            grad_scale = widened(dots).sum() / (loss_scale * scale)
            grad_scale = grad_scale + own.record.scale_gradient(own, state, grad_losses)
            grads[2] = grad_scale.to(scale.dtype)
        if needs_grad[3]:
            grads[3] = own.record.bias_gradient(own, state, grad_losses).to(scale.dtype)
        return tuple(grads)


def _through_rows(unit_grad, values, loss_scale, cosine, backend):
    """(the gradient of the rows `values`, the dot product of each unit row and its gradient).

    unit_grad: the gradient of the unit rows times `loss_scale`; None if it is not needed.
    """
    if unit_grad is None:
        return None, None
    rows_backward = backend.unit_rows_backward if cosine else backend.dot_rows_backward
    inverse = backend.operand_rows(values, cosine)[1]
    return rows_backward(unit_grad, values, inverse, 1 / loss_scale, values.dtype)


def _own(tile, batch):
    """The tile of this rank's rows and this rank's columns; their state is complete."""
    first = batch.first_column
    own = slice(first, first + batch.column_counts[batch.rank])
    return replace(tile, pairs=tile.pairs.of_columns(own), group="")


def _guided(tile, unit_x, y, batch, backend):
    """The tile with unit rows of its guide, and with the thresholds of its rows.

    These follow from the scores of the positives, which are on the same rank as their rows.
    """
    tile = replace(tile, pairs=with_unit_rows(tile.pairs, backend))
    if tile.pairs.exclude_above is None:
        return tile
    unit_y = backend.operand_rows(y, tile.cosine)[0]
    pairs = with_thresholds(_own(tile, batch).pairs, unit_x, unit_y, backend)
    return replace(tile, pairs=replace(tile.pairs, thresholds=pairs.thresholds))


def _forward(tile, x, y, batch, backend):
    """The state of this rank's rows over all columns and of its columns over all rows."""
    unit_x = backend.operand_rows(x, tile.cosine)[0]
    tile = _guided(tile, unit_x, y, batch, backend)
    own_parts = [part for part in tile.parts if part.axis != COLUMNS]
    column_parts = [part for part in tile.parts if part.axis == COLUMNS]
    mine, home = None, Home(tile.split(tile.empty_state(0, len(y), y.device))[1])
    for columns, (visiting,) in travel(batch, [y], home):
        part = replace(tile, pairs=tile.pairs.of_columns(columns))
        unit_y = backend.operand_rows(visiting, tile.cosine)[0]
        found = tile.split(state_of(part, unit_x, unit_y, backend))
        mine = found[0] if mine is None else tile.merge(own_parts, mine, found[0])
        home.tensors = tile.merge(column_parts, home.arrive(), found[1])
    if tile.whole_rows:
        mine = _terms(replace(tile, row_metrics=None), unit_x, y, mine, batch, backend)
    return tile.all_reduce([*mine, *home.tensors], [MATRIX])


def _terms(tile, unit_x, y, state, batch, backend):
    """The state of rows with the terms that need the row's sums over all columns."""
    later = [part for part in tile.parts if part.needs_row]
    sums = state[: sum(part.size for part in tile.parts if not part.needs_row)]
    terms = None
    for columns, (visiting,) in travel(batch, [y]):
        part = replace(tile, pairs=tile.pairs.of_columns(columns))
        unit_y = backend.operand_rows(visiting, tile.cosine)[0]
        found = state_of(part, unit_x, unit_y, backend, sums=sums)
        found = found[len(sums) :]
        terms = found if terms is None else tile.merge(later, terms, found)
    return [*sums, *terms]


def _score_grads(tile, x, y, coefficients, needs_grad, batch, backend):
    """[dL/dunit_x of this rank's rows, dL/dunit_y of its columns], None where not needed."""
    want_x, want_y = needs_grad
    unit_x, inverse = backend.operand_rows(x, tile.cosine)
    tile = _guided(tile, unit_x, y, batch, backend)
    grad_x = torch.zeros_like(unit_x, dtype=inverse.dtype) if want_x else None
    home = Home([y.new_zeros(y.shape, dtype=inverse.dtype)] if want_y else [])
    of_columns = tile.column_coefficients(coefficients)
    for columns, (visiting, *visiting_columns) in travel(batch, [y, *of_columns], home):
        part = replace(tile, pairs=tile.pairs.of_columns(columns))
        unit_y = backend.operand_rows(visiting, tile.cosine)[0]
        coefficients = tile.with_column_coefficients(coefficients, visiting_columns)
        # This rank's part of the gradient, while the sum of the earlier ranks is still travelling.
        share = inverse.new_zeros(unit_y.shape) if want_y else None
        workspace = backend.workspace(unit_x, unit_y)
        for block in blocks_of(unit_x, unit_y, backend):
            panel = backend.score_grad(part, unit_x, unit_y, block, coefficients, workspace)
            of_rows, within = block
            if want_x:
                backend.multiply(panel, unit_y[within], grad_x[of_rows], accumulate=True)
            if want_y:
                backend.multiply(panel.t(), unit_x[of_rows], share[within], accumulate=True)
        if want_y:
            home.tensors = [home.arrive()[0].add_(share)]
    return [grad_x, home.tensors[0] if want_y else None]


# ---- selections, and the few scores that they need ----


def ring_closest(x, y, unit_x, unit_y, semi_hard, pairs, batch, backend, row_metrics=None):
    """`fastsim.engine.selection.closest_column` over the columns of all ranks, which travel.

    unit_x (N, D), unit_y (M_rank, D): unit rows of the embeddings x and y.
    """
    unit_x, unit_y, dtype = unit_x.detach(), unit_y.detach(), x.dtype
    rows = backend.operand(selected_rows(x, unit_x, backend), dtype)
    lent = _lent(unit_y, y, backend)
    # From the same products as the scores, so that a copy of a positive ties with it.
    ceilings = unit_x.new_empty(0)
    if len(unit_x):
        ceilings = backend.paired_scores(rows, backend.operand(lent[-1][: len(unit_x)], dtype))
    best, found = torch.full_like(ceilings, -torch.inf), torch.full_like(pairs.positives, -1)
    for columns, visiting in travel(batch, lent):
        if not len(rows):
            continue
        part = pairs.of_columns(columns)
        others = backend.operand(visiting[-1], dtype)
        closest = backend.closest(part, semi_hard, rows, others, ceilings, row_metrics)
        scores = torch.linalg.vecdot(unit_x, visiting[0][closest.clamp(min=0)])
        best, found = _larger(best, found, scores, closest, columns)
    return found


def _lent(points, embeddings, backend):
    """The tensors that travel: the columns, and last what the selection compares."""
    return [points, embeddings] if backend.scales_rows(embeddings.dtype) else [points]


def _larger(best, found, values, within, columns):
    """For each row the larger value and its column; of equal values the first column.

    best, found: value and column so far. values, within: those of a slice of the columns; `within`
    counts from its start, -1 for none.
    """
    place = within + columns.start
    better = (within >= 0) & ((values > best) | ((values == best) & (place < found)))
    return torch.where(better, values, best), torch.where(better, place, found)


def ring_hardest(x, y, of, measure, pairs, batch, backend):
    """`fastsim.engine.selection.hardest_columns` over the columns y of all ranks, which travel.

    of: the embeddings from which the points x and y were made.
    measure: a distance of `fastsim.losses.hardest`; it compares the hardest columns of two ranks.
    """
    x, y = x.detach(), y.detach()
    best = [x.new_full((len(x),), -torch.inf) for _ in range(2)]
    found = [torch.full_like(pairs.row_groups, -1) for _ in range(2)]
    for columns, lent in travel(batch, _lent(y, of[1], backend)):
        visiting, sides = lent[0], (of[0], lent[-1])
        rows, others, offsets, kind, _ = measure.operands(x, visiting, sides, backend)
        part = pairs.of_columns(columns)
        hardest = hardest_columns(rows, others, offsets, kind, part, backend)
        for side, (sign, within) in enumerate(zip((1, -1), hardest, strict=True)):
            distances = sign * measure.distances(x, visiting[within.clamp(min=0)])
            merged = _larger(best[side], found[side], distances, within, columns)
            best[side], found[side] = merged
    return found


def ring_sum(function, x, y, batch):
    """The sum of function(x, y of a rank, its slice of columns) over all ranks, whose y travel.

    function: returns tensors that are differentiable in x (N, D) and y (M_rank, D). The backward
    pass calls it again, for one rank's y at a time.
    """
    return _RingSum.apply(x, y, function, batch)


class _RingSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, function, batch):
        ctx.save_for_backward(x, y)
        ctx.call = function, batch
        parts = [function(x, visiting, columns) for columns, (visiting,) in travel(batch, [y])]
        return tuple(sum(part) for part in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, y = ctx.saved_tensors
        function, batch = ctx.call
        grad_x, home = torch.zeros_like(x), Home([torch.zeros_like(y)])
        for columns, (visiting,) in travel(batch, [y], home):
            with without_autocast(x.device.type):
                with torch.enable_grad():
                    sides = x.detach().requires_grad_(), visiting.detach().requires_grad_()
                    parts = function(*sides, columns)
                wanted = [(p, g) for p, g in zip(parts, grads, strict=True) if p.requires_grad]
                outputs, above = zip(*wanted, strict=True)
                of_rows, of_columns = torch.autograd.grad(outputs, sides, above)
            grad_x += of_rows
            home.tensors = [home.arrive()[0].add_(of_columns)]
        return grad_x, *home.tensors, None, None

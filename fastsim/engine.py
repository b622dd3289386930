"""The engine: a loss over all scores of x and y, and its gradient, one panel of scores at a time.

    prepare   x, y -> unit rows, inverse norms
    fold      score panels -> state of rows and columns
    finish    state -> losses                              (fastsim/tiles.py)
    slope     score panel -> G = dL/dS for that panel
    product   dunit_x = G unit_y,  dunit_y += G^T unit_x   library products
    unprepare dx = r (dunit_x - (unit_x . dunit_x) unit_x)

Three plans. "visit": where a block of whole rows gives state and slope at once and the weights of
the losses are known (reduction "mean" or "sum"), the forward pass visits each panel once and keeps
the gradients of the inputs, which the backward pass multiplies by what comes from above. "whole":
the same in one call of the backend, for small batches. "fold": the forward pass folds and the
backward pass visits the panels again.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fastsim.backends import get
from fastsim.distributed import least
from fastsim.operators import define
from fastsim.ring import ring_tile_loss
from fastsim.scores import compute_dtype, without_autocast
from fastsim.targets import Guide, Pairs, with_thresholds
from fastsim.tiles import Tile, margin_gradient


def tile_loss(tile, x, y, *, scale, bias=0.0, weights=None, batch=None, backend):
    """The loss `tile` over the scores of x (N, D) and y (M, D); y=None: x with itself.

    scale and bias are numbers or 0-d tensors; `weights` (N,) asks for sum_i weights_i loss_i,
    None for the losses (N,) themselves. `batch`: of which x and y are this process's part, the
    pairs of the tile being those of x with the columns of all processes; None: they are all of it.
    Returns the compute type: float64 for float64 inputs, else float32; log-sum-exps, which are to
    be merged with others, are float64.
    """
    dtype = compute_dtype(x)
    scale, bias = as_scalar(scale, dtype, x.device), as_scalar(bias, dtype, x.device)
    if batch is not None and batch.group is not None:
        y = x if y is None else y
        tile = tile if tile.rows_alone else replace(tile, group=batch.name)
        if batch.ring:
            return ring_tile_loss(tile, x, y, scale, bias, weights, batch, backend)
        y = batch.gather_columns(y)
    y = None if y is x else y
    sides = (x, y, scale, bias)
    wants = [s is not None and s.requires_grad and torch.is_grad_enabled() for s in sides]
    plan = _plan(tile, x, x if y is None else y, weights, any(wants), backend)
    inputs = (
        x,
        y,
        scale,
        bias,
        weights,
        *_once(*tile.pairs.tensors()),
        *_guide_tensors(tile.pairs.guide),
        tile.levels,
        tile.pairs.otherwise,
        tile.pairs.skip,
        tile.pairs.offset,
        tile.pairs.above,
        tile.kind,
        tile.margin,
        tile.normalise,
        tile.symmetric,
        tile.group,
        tile.positive_scale,
        tile.cosine,
        wants,
        plan,
        backend.name,
    )
    return _TileLoss.apply(*inputs) if any(wants) else _tile(*inputs)[0]


def _plan(tile, x, y, weights, wanted, backend):
    """How the forward pass goes about it."""
    rows, columns = x.shape[0], y.shape[0]
    alone = tile.cosine and tile.pairs.plain and not tile.group and weights is not None
    if alone and backend.serves_whole(tile.kind, rows, columns, x.shape[1]):
        return "whole"
    if tile.group or not wanted or (weights is None and tile.kind != "levels"):
        return "fold"
    if tile.rows_alone:
        return "visit" if backend.whole_rows_fit(columns) else "fold"
    return "visit" if backend.whole_matrix_fits(rows, columns) else "fold"


def _once(positives, row_ids, column_ids, row_groups, column_groups, dense):
    """The tensors of the pairs, None for the columns' where they are the rows' own.

    torch.compile does not trace a function that is given one tensor twice.
    """
    column_ids = None if column_ids is row_ids else column_ids
    column_groups = None if column_groups is row_groups else column_groups
    return positives, row_ids, column_ids, row_groups, column_groups, dense


def _guide_tensors(guide):
    """The tensors of a guide, None for the columns' where they are the rows' own."""
    if guide is None:
        return None, None, None
    return guide.rows, None if guide.columns is guide.rows else guide.columns, guide.thresholds


def _guide(rows, columns, thresholds):
    return None if rows is None else Guide(rows, rows if columns is None else columns, thresholds)


def as_scalar(value, dtype, device):
    """A number or 0-d tensor as a 0-d tensor."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


# ---- the registered operators ----

_TILE = (
    "Tensor? weights, Tensor? positives, Tensor? row_ids, Tensor? column_ids, Tensor? row_groups, "
    "Tensor? column_groups, Tensor? dense, Tensor? guide_rows, Tensor? guide_columns, "
    "Tensor? thresholds, Tensor? levels, float otherwise, str skip, int offset, float? above, "
    "str kind, float margin, bool normalise, bool symmetric, str group, float positive_scale, "
    "bool cosine, bool[] wants, str plan, str backend"
)
_FORWARD = f"(Tensor x, Tensor? y, Tensor scale, Tensor bias, {_TILE}) -> Tensor[]"
_BACKWARD = (
    f"(Tensor grad, Tensor[] saved, Tensor x, Tensor? y, Tensor scale, Tensor bias, {_TILE})"
    " -> Tensor[]"
)


class _Call:
    """The arguments of one operator call, by name; `fake`: the tensors hold no values."""

    def __init__(self, x, y, scale, bias, weights, *arguments, fake=False):
        *tensors, levels, otherwise, skip, offset, above = arguments[:14]
        kind, margin, normalise, symmetric, group, positive_scale, cosine = arguments[14:21]
        self.wants, self.plan, name = arguments[21:]
        positives, row_ids, column_ids, row_groups, column_groups, dense, *guide = tensors
        self.together = y is None
        self.x, self.y, self.weights = x, x if y is None else y, weights
        self.backend = get(name)
        self.scale = scale
        number = self.backend.number if not fake else lambda scalar: scalar
        self.tile = Tile(
            kind,
            Pairs(
                positives,
                row_ids,
                row_ids if column_ids is None else column_ids,
                row_groups,
                row_groups if column_groups is None else column_groups,
                dense,
                otherwise,
                skip,
                offset,
                above,
                _guide(*guide),
            ),
            number(scale),
            number(bias),
            margin,
            normalise,
            symmetric,
            levels,
            group,
            positive_scale,
            cosine,
        )

    @property
    def products(self):
        """Which gradients of unit rows are computed: (x, y); together, x's holds both shares."""
        want_x, want_y, want_scale, _ = self.wants
        if self.together:
            return want_x or want_scale, False
        # The scale's gradient is sum_i unit_x . dunit_x / scale, so one side has to be there.
        return want_x or (want_scale and not want_y), want_y

    def boosted(self, weights):
        """(weights, the factor that takes their boost back out of the gradient)."""
        boost = self.backend.boost(self.tile, weights, self.x.dtype, self.y.shape[0])
        if boost is None:
            return weights, None
        if self.tile.group:
            boost = least(boost, self.tile.group)  # columns add up the weights of all ranks
        return boost if weights is None else weights * boost, 1 / boost

    def units(self):
        """Unit rows and inverse norms of both sides; y's norms are empty where y is x.

        Where the scores are no cosines the rows are as they came, and the norms are not asked for.
        The guide's embeddings become unit rows in any case, or thresholds of the scores a guide.
        """
        prepare = self.backend.unit_rows if self.tile.cosine else self.backend.plain_rows
        unit_x, inverse_x = prepare(self.x)
        if self.together:
            unit_y, inverse_y = unit_x, inverse_x.new_empty(0)
        else:
            unit_y, inverse_y = prepare(self.y)
        pairs, guide = self.tile.pairs, self.tile.pairs.guide
        if guide is not None:
            rows = self.backend.unit_rows(guide.rows)[0]
            same = guide.columns is guide.rows
            columns = rows if same else self.backend.unit_rows(guide.columns)[0]
            pairs = replace(pairs, guide=Guide(rows, columns, guide.thresholds))
        elif pairs.above is not None:
            pairs = with_thresholds(pairs, unit_x, unit_y, self.backend)
        self.tile = replace(self.tile, pairs=pairs)
        return unit_x, unit_y, inverse_x, inverse_y


class _Products:
    """dunit_x and dunit_y summed over slope panels; empty where not wanted."""

    def __init__(self, call, unit_x, unit_y, dtype):
        self.multiply = call.backend.multiply
        self.together = call.together
        self.units = unit_x, unit_y
        want_x, want_y = call.products
        self.wants = want_x, want_y or (want_x and call.together)
        # Unit rows of a band are not read again once its only panel is done: their place is free.
        whole = call.backend.whole_rows_fit(unit_y.shape[0])
        fits = unit_x.dtype == dtype and unit_x.is_contiguous()
        if want_x and whole and fits and not call.together:
            self.x = unit_x
        else:
            self.x = unit_x.new_empty(unit_x.shape if want_x else 0, dtype=dtype)
        self.y = unit_y.new_empty(unit_y.shape if self.wants[1] else 0, dtype=dtype)
        self.row_begun = -1

    def add(self, panel, block):
        rows, columns = block
        unit_x, unit_y = self.units
        if self.wants[1]:
            # The first band of rows meets every column.
            self.multiply(panel.t(), unit_x[rows], self.y[columns], accumulate=rows.start > 0)
        if self.wants[0]:
            begun = rows.start == self.row_begun
            self.multiply(panel, unit_y[columns], self.x[rows], accumulate=begun)
            self.row_begun = rows.start

    def result(self):
        if self.together and self.wants[0]:
            return self.x.add_(self.y), self.y.new_empty(0)
        return self.x, self.y


def _forward(*arguments):
    call = _Call(*arguments)
    with without_autocast(call.x.device.type):
        if call.plan == "whole":
            y = None if call.together else call.y
            loss, *saved = call.backend.whole(call.tile, call.x, y, call.weights, call.products)
            return [loss, *(saved if any(call.wants) else ())]
        unit_x, unit_y, inverse_x, inverse_y = call.units()
        if call.plan == "visit":
            state, grads = _visit_panels(call, unit_x, unit_y, inverse_x.dtype)
            _, shrink = call.boosted(call.weights)
            factor = inverse_x.new_ones(()) if shrink is None else shrink
            saved = _input_gradients(
                call, state, call.weights, grads, (inverse_x, inverse_y), factor, inverse_x.dtype
            )
        else:
            saved = state = call.tile.merge(call.backend.fold(call.tile, unit_x, unit_y))
        loss = call.tile.finish(state)
        if call.weights is not None:
            loss = (loss * call.weights).sum()
        dtype = call.tile.loss_dtype(inverse_x.dtype)
        return [loss.to(dtype, copy=True), *(saved if any(call.wants) else ())]


def _visit_panels(call, unit_x, unit_y, dtype):
    products = _Products(call, unit_x, unit_y, dtype)
    workspace = call.backend.workspace(unit_x, unit_y, whole_rows=True)
    weights, _ = call.boosted(call.weights)
    states = []
    for block in call.backend.blocks(unit_x.shape[0], unit_y.shape[0], whole_rows=True):
        state, panel = call.backend.visit(call.tile, unit_x, unit_y, block, weights, workspace)
        states.append(state)
        products.add(panel, block)
    state = states[0] if len(states) == 1 else list(map(torch.cat, zip(*states, strict=True)))
    return state, products.result()


def _slope_panels(call, unit_x, unit_y, coefficients, dtype):
    # In the order of the fold before it, so that the allocator finds its places again.
    workspace = call.backend.workspace(unit_x, unit_y)
    products = _Products(call, unit_x, unit_y, dtype)
    lower = call.tile.pairs.each_once
    for block in call.backend.blocks(unit_x.shape[0], unit_y.shape[0], lower=lower):
        panel = call.backend.slope(call.tile, unit_x, unit_y, block, coefficients, workspace)
        products.add(panel, block)
    return products.result()


def _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, dtype):
    """dL/dx and dL/dy in `dtype`, empty where not wanted, dL/dscale and dL/dbias (2,) float64.

    grad_losses: dL/dloss of each row; factor: what the gradients of the unit rows still lack.
    """
    grads, along = [], 0.0
    backend = call.backend
    unprepare = backend.unit_rows_backward if call.tile.cosine else backend.plain_rows_backward
    for values, unit_grad, inverse in zip((call.x, call.y), unit_grads, inverses, strict=True):
        grad = values.new_empty(0, dtype=dtype)
        if unit_grad.numel():
            grad, dots = unprepare(unit_grad, values, inverse, factor, dtype)
            along = factor * dots.double().sum()
        grads.append(grad)
    parameters = inverses[0].new_zeros(2, dtype=torch.float64)
    if call.wants[2]:
        # Together, dunit_x holds the rows' and the columns' share of the same sum.
        parameters[0] = along / ((1 + call.together) * call.scale)
        if call.tile.margin:
            parameters[0] += margin_gradient(call.tile, state, grad_losses.double())
    if call.wants[3]:
        parameters[1] = (grad_losses * state[1]).sum()
    return *grads, parameters


def _backward(grad, state, *arguments):
    """The gradients of the inputs from the state of a forward pass that only folded."""
    call = _Call(*arguments)
    with without_autocast(call.x.device.type):
        grad_losses = grad if call.weights is None else grad * call.weights
        grad_losses = call.tile.own_gradient(grad_losses)
        unit_x, unit_y, *inverses = call.units()
        boosted, shrink = call.boosted(grad_losses.double())
        factor = grad.new_ones(()) if shrink is None else shrink
        dtype = inverses[0].dtype
        coefficients = call.tile.coefficients(state, boosted)
        coefficients = [c if c is None else c.to(dtype) for c in coefficients]
        unit_grads = _slope_panels(call, unit_x, unit_y, coefficients, dtype)
        del unit_x, unit_y  # before the results are made of their gradients
        return list(
            _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, call.x.dtype)
        )


def _forward_fake(*arguments):
    call = _Call(*arguments, fake=True)
    rows, columns = call.x.shape[0], call.y.shape[0]
    dtype = compute_dtype(call.x)
    shape = call.tile.loss_shape(rows, columns) if call.weights is None else ()
    loss = call.x.new_empty(shape, dtype=call.tile.loss_dtype(dtype))
    if not any(call.wants):
        return [loss]
    if call.plan == "fold":
        shapes = call.tile.state_shapes(rows, columns)
        return [loss, *(loss.new_empty(shape, dtype=torch.float64) for shape in shapes)]
    return [loss, *_gradients_fake(call, dtype)]


def _backward_fake(grad, state, *arguments):
    call = _Call(*arguments, fake=True)
    return _gradients_fake(call, call.x.dtype)


def _gradients_fake(call, dtype):
    sides = zip((call.x, call.y), call.products, strict=True)
    grads = [side.new_empty(side.shape if want else 0, dtype=dtype) for side, want in sides]
    return [*grads, call.x.new_empty(2, dtype=torch.float64)]


_tile = define("tile", _FORWARD, _forward, _forward_fake)
_tile_backward = define("tile_backward", _BACKWARD, _backward, _backward_fake)

_TENSORS = 15  # x, y, scale, bias, weights, the tensors of the pairs and the guide, levels


class _TileLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        loss, *saved = _tile(*inputs)
        ctx.options = inputs[_TENSORS:]
        ctx.dtypes = inputs[0].dtype, inputs[2].dtype
        ctx.found = inputs[-2] != "fold"
        ctx.save_for_backward(*(() if ctx.found else inputs[:_TENSORS]), *saved)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        if ctx.found:
            parts = [part * grad for part in saved]
        else:
            tensors, state = saved[:_TENSORS], saved[_TENSORS:]
            parts = _tile_backward(grad, state, *tensors, *ctx.options)
        wants = ctx.options[-3]
        of_inputs, of_scalars = ctx.dtypes
        grad_x, grad_y, (grad_scale, grad_bias) = parts
        grads = (
            grad_x.to(of_inputs) if wants[0] else None,
            grad_y.to(of_inputs) if wants[1] else None,
            grad_scale.to(of_scalars) if wants[2] else None,
            grad_bias.to(of_scalars) if wants[3] else None,
        )
        return (*grads, *(None,) * (_TENSORS - 4 + len(ctx.options)))

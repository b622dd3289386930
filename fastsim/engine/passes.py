"""The passes of one operator call: panels of scores in, loss and gradients out (see engine.py)."""

from dataclasses import replace

import torch

from fastsim.backends import get
from fastsim.distributed import all_reduce_min
from fastsim.pairs import Guide, Pairs, with_thresholds
from fastsim.scores import without_autocast
from fastsim.tile import Tile, margin_gradient


class Call:
    """The arguments of one operator call, by name; `fake`: the tensors hold no values."""

    def __init__(self, x, y, scale, bias, weights, *arguments, fake=False):
        *tensors, levels, negative_target, skip, offset, above = arguments[:14]
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
                negative_target,
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

    def with_loss_scale(self, weights):
        """(weights, the factor that takes their loss scale back out of the gradient)."""
        loss_scale = self.backend.loss_scale(self.tile, weights, self.x.dtype, self.y.shape[0])
        if loss_scale is not None and self.tile.group:
            loss_scale = all_reduce_min(
                loss_scale, self.tile.group
            )  # columns add up the weights of all ranks
        if loss_scale is None:
            return weights, None
        return loss_scale if weights is None else weights * loss_scale, 1 / loss_scale

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


def at_once(tile, x, y, backend):
    """Whether one fused pass of a block of whole rows gives its state and its score gradients."""
    return tile.rows_alone or backend.whole_matrix_fits(x.shape[0], y.shape[0], x.device)


class _Products:
    """dunit_x and dunit_y summed over score gradient panels; empty where not wanted."""

    def __init__(self, call, unit_x, unit_y, dtype):
        self.multiply = call.backend.multiply
        self.together = call.together
        self.units = unit_x, unit_y
        want_x, want_y = call.products
        self.wants = want_x, want_y or (want_x and call.together)
        # Unit rows of a band are not read again once its only panel is done: their place is free.
        whole = call.backend.whole_rows_fit(unit_y.shape[0], unit_y.device)
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


def forward(*arguments):
    call = Call(*arguments)
    with without_autocast(call.x.device.type):
        if call.plan == "whole":
            y = None if call.together else call.y
            loss, *saved = call.backend.whole(call.tile, call.x, y, call.weights, call.products)
            return [loss, *(saved if any(call.wants) else ())]
        unit_x, unit_y, inverse_x, inverse_y = call.units()
        if call.plan == "fused":
            once = at_once(call.tile, call.x, call.y, call.backend)
            fused_pass = _fused_panels if once else _forward_and_score_grad
            state, grads = fused_pass(call, unit_x, unit_y, inverse_x.dtype)
            del unit_x, unit_y  # before the results are made of their gradients
            _, shrink = call.with_loss_scale(call.weights)
            factor = inverse_x.new_ones(()) if shrink is None else shrink
            saved = _input_gradients(
                call, state, call.weights, grads, (inverse_x, inverse_y), factor, inverse_x.dtype
            )
        else:
            saved = state = call.tile.merge(call.backend.forward(call.tile, unit_x, unit_y))
        loss = call.tile.finish(state)
        if call.weights is not None:
            loss = (loss * call.weights).sum()
        dtype = call.tile.loss_dtype(inverse_x.dtype)
        return [loss.to(dtype, copy=True), *(saved if any(call.wants) else ())]


def _fused_panels(call, unit_x, unit_y, dtype):
    products = _Products(call, unit_x, unit_y, dtype)
    workspace = call.backend.workspace(unit_x, unit_y, whole_rows=True)
    weights, _ = call.with_loss_scale(call.weights)
    states = []
    for block in _whole_rows(call, unit_x, unit_y):
        state, panel = call.backend.fused_pass(call.tile, unit_x, unit_y, block, weights, workspace)
        states.append(state)
        products.add(panel, block)
    state = states[0] if len(states) == 1 else list(map(torch.cat, zip(*states, strict=True)))
    return state, products.result()


def _whole_rows(call, unit_x, unit_y):
    """Blocks of whole rows; the whole matrix where a row alone does not decide."""
    rows, columns = unit_x.shape[0], unit_y.shape[0]
    if not call.tile.rows_alone:
        return [(slice(0, rows), slice(0, columns))]
    return call.backend.blocks(rows, columns, unit_x.device, whole_rows=True)


def _forward_and_score_grad(call, unit_x, unit_y, dtype):
    workspace = call.backend.workspace(unit_x, unit_y, keep=True)
    state = call.backend.forward(call.tile, unit_x, unit_y, workspace=workspace)
    weights, _ = call.with_loss_scale(call.weights)
    weights = 1.0 if weights is None else weights.double()
    coefficients = _coefficients(call.tile, state, weights, dtype)
    return state, _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, workspace)


def _coefficients(tile, state, weights, dtype):
    return [c if c is None else c.to(dtype) for c in tile.coefficients(state, weights)]


def _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, workspace):
    products = _Products(call, unit_x, unit_y, dtype)
    lower = call.tile.pairs.each_once
    shape = unit_x.shape[0], unit_y.shape[0]
    for block in call.backend.blocks(*shape, unit_x.device, lower=lower):
        panel = call.backend.score_grad(call.tile, unit_x, unit_y, block, coefficients, workspace)
        products.add(panel, block)
    return products.result()


def _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, dtype):
    """dL/dx and dL/dy in `dtype`, empty where not wanted, dL/dscale and dL/dbias (2,) float64.

    grad_losses: dL/dloss of each row; factor: what the gradients of the unit rows still lack.
    """
    grads, along = [], 0.0
    backend = call.backend
    rows_backward = backend.unit_rows_backward if call.tile.cosine else backend.plain_rows_backward
    for values, unit_grad, inverse in zip((call.x, call.y), unit_grads, inverses, strict=True):
        grad = values.new_empty(0, dtype=dtype)
        if unit_grad.numel():
            grad, dots = rows_backward(unit_grad, values, inverse, factor, dtype)
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


def backward(grad, state, *arguments):
    """The gradients of the inputs from the state of a forward pass that only folded."""
    call = Call(*arguments)
    with without_autocast(call.x.device.type):
        grad_losses = grad if call.weights is None else grad * call.weights
        grad_losses = call.tile.own_gradient(grad_losses)
        unit_x, unit_y, *inverses = call.units()
        with_loss_scale, shrink = call.with_loss_scale(grad_losses.double())
        factor = grad.new_ones(()) if shrink is None else shrink
        dtype = inverses[0].dtype
        coefficients = _coefficients(call.tile, state, with_loss_scale, dtype)
        # In the order of the forward reduction before it, so that the allocator finds its places
        # again.
        workspace = call.backend.workspace(unit_x, unit_y)
        unit_grads = _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, workspace)
        del unit_x, unit_y, workspace  # before the results are made of their gradients
        return list(
            _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, call.x.dtype)
        )


def _guide(rows, columns, thresholds):
    return None if rows is None else Guide(rows, rows if columns is None else columns, thresholds)

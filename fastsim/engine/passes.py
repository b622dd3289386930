"""The forward and backward operators of a tile loss. Terms: fastsim/README.md, "The engine".

Loss and gradients are computed in one of four ways, chosen here, where the sizes are known:

one call: the backend does everything in one call of its own (`Backend.in_one_call`).
fused: a block of whole rows contains all that its state and its score gradients depend on, so each
    score is computed once. If the loss also depends on columns or on the whole matrix, the block
    has to be the whole matrix.
mirrored: when x is compared with itself, s_ij = s_ji. A backend may compute each score once for
    both pairs: first the state, then both gradients (`Backend.mirrored`).
two passes: first the state of all blocks; then the score gradients of all blocks, from scores that
    the backend has kept or computes again.
"""

from fastsim.autocast import without_autocast
from fastsim.engine.arguments import TileArguments
from fastsim.engine.call import Call, Products
from fastsim.engine.one_call import one_call_serves
from fastsim.engine.scoring import blocks_of, state_of
from fastsim.kinds.kind import joined
from fastsim.precision import compute_dtype, wide_dtype, widened


def forward(*arguments):
    """[loss, *saved, *row_metrics].

    saved: the gradients of the inputs, or the state from which `backward` makes them; nothing if
    no gradient is needed. row_metrics: `TileLoss.row_metrics`, if asked for.
    """
    call = Call(TileArguments(*arguments))
    with without_autocast(call.x.device.type):
        if _goes_in_one_call(call):
            return _returned(call, *_in_one_call(call))
        call.weigh_rows()
        if call.arguments.finds_gradients():
            state, saved = _state_and_gradients(call)
        else:
            saved = state = _state(call)
        loss = call.tile.finish(state)
        if call.weights is not None:
            loss = (loss * call.weights).sum()
        dtype = call.tile.loss_dtype(call.x)
        return _returned(call, loss.to(dtype, copy=True), saved)


def _state_and_gradients(call):
    """(the state, the gradients of the inputs)."""
    unit_x, unit_y, *inverses = call.units()
    dtype = inverses[0].dtype
    mirrored = _mirrored(call, unit_x, keep=True)
    if mirrored is not None:
        state, unit_grads, factor = _mirrored_panels(call, mirrored, dtype)
    else:
        panels = _fused_panels if at_once(call) else _forward_and_score_grad
        state, unit_grads, factor = panels(call, unit_x, unit_y, dtype)
    del unit_x, unit_y, mirrored  # before `_input_gradients` allocates its results
    return state, _input_gradients(call, state, call.weights, unit_grads, inverses, factor, dtype)


def _state(call):
    """The state over the scores of all ranks."""
    unit_x, unit_y, *_ = call.units()
    mirrored = _mirrored(call, unit_x)
    if mirrored is not None:
        own = mirrored.forward()
    else:
        own = state_of(call.first_look, unit_x, unit_y, call.backend)
    return call.tile.all_reduce(own)


def _goes_in_one_call(call):
    sizes = call.x.shape[0], call.y.shape[0], call.x.shape[1], call.self_similarity, call.x.dtype
    with_metrics = call.row_metrics is not None
    return one_call_serves(call.tile, *sizes, call.weights, call.backend, with_metrics=with_metrics)


def _in_one_call(call):
    """(loss, the gradients of the inputs)."""
    tile, y = call.first_look, None if call.self_similarity else call.y
    # Scale and bias as tensors: a backend computes no gradient of a number.
    given = call.x, y, call.arguments.scale, call.arguments.bias, call.weights
    if not any(call.needs_grad):
        return call.backend.in_one_call(tile, *given, None)[0], ()
    loss, *found = call.backend.in_one_call(tile, *given, call.products)
    dtype = compute_dtype(call.x)
    grads = call.backend.one_call_gradients(tile, None, found, given, call.needs_grad, dtype)
    return loss, _as_returned(call, grads, dtype)


def _as_returned(call, grads, dtype):
    """The gradients of `one_call_gradients` as `forward` returns them: empty where not needed."""
    *sides, numbers = grads
    for place, want in enumerate(call.needs_grad[:2]):
        if not want:
            sides[place] = call.x.new_empty(0, dtype=dtype)
    if numbers is None:
        numbers = call.x.new_zeros(2, dtype=wide_dtype(call.x.device))
    return *sides, numbers


def _returned(call, loss, saved):
    """What `forward` returns."""
    row_metrics = () if call.row_metrics is None else (call.row_metrics,)
    return [loss, *(saved if any(call.needs_grad) else ()), *row_metrics]


def at_once(call):
    """Whether a fused pass over blocks of whole rows serves this loss at this size."""
    rows, columns, device = call.x.shape[0], call.y.shape[0], call.x.device
    if not call.backend.whole_rows_fit(columns, device):
        return False
    return call.tile.rows_alone or call.backend.whole_matrix_fits(rows, columns, device)


def _whole_rows(call):
    """Blocks of whole rows; the whole matrix if the loss does not depend on rows alone."""
    rows, columns = call.x.shape[0], call.y.shape[0]
    if not call.tile.rows_alone:
        return [(slice(0, rows), slice(0, columns))]
    return call.backend.blocks(rows, columns, call.x.device, whole_rows=True)


def _fused_panels(call, unit_x, unit_y, dtype):
    weights, factor = call.with_loss_scale(call.weights)
    products = Products(call, unit_x, unit_y, dtype, spent=True)
    workspace = call.backend.workspace(unit_x, unit_y, whole_rows=True)
    states = []
    for block in _whole_rows(call):
        state, panel = call.backend.fused_pass(
            call.first_look, unit_x, unit_y, block, weights, workspace
        )
        states.append(state)
        products.add(panel, block)
    return joined(states), products.result(), factor


def _forward_and_score_grad(call, unit_x, unit_y, dtype):
    backend, workspace = call.backend, None
    if backend.keeps_scores and backend.whole_rows_fit(unit_y.shape[0], unit_y.device):
        workspace = backend.workspace(unit_x, unit_y, keep=True)
    state = backend.forward(call.first_look, unit_x, unit_y, workspace=workspace)
    coefficients, factor = call.coefficients(state, call.weights, dtype)
    if workspace is None:
        workspace = backend.workspace(unit_x, unit_y)
    grads = _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, workspace)
    return state, grads, factor


def _mirrored(call, unit, *, keep=False):
    """`Backend.mirrored` of the call's unit rows, or None."""
    wanted = call.products[0] or not any(call.needs_grad)
    if not call.self_similarity or not wanted or call.row_metrics is not None:
        return None
    return call.backend.mirrored(call.tile, unit, keep=keep)


def _mirrored_panels(call, mirrored, dtype):
    state = mirrored.forward()
    coefficients, factor = call.coefficients(state, call.weights, dtype)
    grad = mirrored.gradient(coefficients, dtype)
    return state, (grad, grad.new_empty(0)), factor


def _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, workspace):
    lower = call.tile.pairs.each_once
    blocks = list(blocks_of(unit_x, unit_y, call.backend, lower=lower))
    one_by_band = len({rows.start for rows, _ in blocks}) == len(blocks)
    products = Products(call, unit_x, unit_y, dtype, spent=one_by_band)
    for block in blocks:
        panel = call.backend.score_grad(call.tile, unit_x, unit_y, block, coefficients, workspace)
        products.add(panel, block)
    return products.result()


def _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, dtype):
    """(dL/dx, dL/dy, dL/d(scale, bias) (2,)), the first two in `dtype`, empty if not needed.

    grad_losses: dL/dloss of each row. unit_grads: the gradients of both sides' unit rows divided by
    `factor`.
    """
    grads, dots = [], None  # dots: unit_i . dL/dunit_i / factor of each row of one side
    backend = call.backend
    rows_backward = backend.tile_rows_backward if call.tile.cosine else backend.dot_rows_backward
    sides = zip((call.x, call.y), unit_grads, inverses, call.needs_grad[:2], strict=True)
    for values, unit_grad, inverse, want in sides:
        grad = values.new_empty(values.shape if want and not len(values) else 0, dtype=dtype)
        if unit_grad.numel():
            input_grad, dots = rows_backward(unit_grad, values, inverse, factor, dtype)
            # A side that needs no gradient is here for the gradient of the scale alone.
            grad = input_grad if want else grad
        grads.append(grad)
    parameters = inverses[0].new_zeros(2, dtype=wide_dtype(call.x.device))
    if call.needs_grad[2]:
        # If x is compared with itself, dL/dunit_x is the sum over rows and columns.
        if dots is not None:
            total = factor * widened(dots).sum()
            parameters[0] = total / ((1 + call.self_similarity) * call.scale)
        wide_grad = None if grad_losses is None else widened(grad_losses)
        parameters[0] += call.tile.record.scale_gradient(call.tile, state, wide_grad)
    if call.needs_grad[3]:
        parameters[1] = call.tile.record.bias_gradient(call.tile, state, grad_losses)
    return *grads, parameters


def backward(grad, state, *arguments):
    """[dL/dx, dL/dy, dL/d(scale, bias)] from the state that the forward pass kept."""
    call = Call(TileArguments(*arguments))
    call.weigh_rows()
    with without_autocast(call.x.device.type):
        # The gradient of a sum comes as one number, expanded to all rows without memory.
        grad = grad.contiguous()
        grad_losses = grad if call.weights is None else grad * call.weights
        grad_losses = call.tile.own_gradient(grad_losses)
        unit_x, unit_y, *inverses = call.units()
        dtype = inverses[0].dtype
        coefficients, factor = call.coefficients(state, grad_losses, dtype)
        # Allocates in the order of the forward pass, so that the allocator finds freed blocks of
        # the same sizes.
        panels = _mirrored(call, unit_x)
        if panels is not None:
            grad = panels.gradient(coefficients, dtype)
            unit_grads = grad, grad.new_empty(0)
        else:
            panels = call.backend.workspace(unit_x, unit_y)
            unit_grads = _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, panels)
        del unit_x, unit_y, panels  # before `_input_gradients` allocates its results
        return list(
            _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, call.x.dtype)
        )

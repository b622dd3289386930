"""What one operator call does: scores in, one block at a time; loss and gradients out.

The terms: fastsim/README.md, "The engine". To find loss and gradients in one call there are
four ways, chosen here, where the sizes are known:

whole: the backend does everything in one call of its own: of a small batch, or band by band.
fused: a block of whole rows has all that its state and its score gradients need, so each panel of
    scores is computed once. A loss that looks at columns, or at the matrix, goes this way where one
    block holds the whole matrix.
mirrored: of rows against themselves, a backend may compute each score once for the two pairs that
    have it: first the state, then the gradient of both (`Backend.mirrored`).
two passes: first the state, of all blocks; then the score gradients, of all blocks, from scores
    that the backend has kept or computes again.
"""

from fastsim.autocast import without_autocast
from fastsim.engine.arguments import TileArguments
from fastsim.engine.call import Call, Products
from fastsim.engine.one_call import takes_whole
from fastsim.engine.scoring import blocks_of, state_of
from fastsim.kinds.kind import joined
from fastsim.precision import wide_dtype, widened
from fastsim.scores import compute_dtype


def forward(*arguments):
    """[loss, if a gradient is wanted those of the inputs or the state, if observed `Tile.seen`]."""
    call = Call(TileArguments(*arguments))
    with without_autocast(call.x.device.type):
        sizes = call.x.shape[0], call.y.shape[0], call.x.shape[1], call.together, call.x.dtype
        observed = call.seen is not None
        if takes_whole(call.tile, *sizes, call.weights, call.backend, observed=observed):
            tile, y = call.first_look, None if call.together else call.y
            products = call.products if any(call.wants) else None
            # As tensors, of which a backend finds the gradients.
            given = call.x, y, call.arguments.scale, call.arguments.bias, call.weights
            loss, *found = call.backend.whole(tile, *given, products)
            if any(call.wants):
                dtype = compute_dtype(call.x)
                found = call.backend.whole_gradients(tile, None, found, given, call.wants, dtype)
                found = _as_returned(call, found, dtype)
            return _returned(call, loss, found)
        call.weigh_rows()
        unit_x, unit_y, inverse_x, inverse_y = call.units()
        if call.arguments.finds_gradients():
            mirrored = _mirrored(call, unit_x, keep=True)
            if mirrored is not None:
                state, grads, factor = _mirrored_panels(call, mirrored, inverse_x.dtype)
            else:
                fused_pass = _fused_panels if at_once(call) else _forward_and_score_grad
                state, grads, factor = fused_pass(call, unit_x, unit_y, inverse_x.dtype)
            del unit_x, unit_y, mirrored  # before the results are made of their gradients
            saved = _input_gradients(
                call, state, call.weights, grads, (inverse_x, inverse_y), factor, inverse_x.dtype
            )
        else:
            mirrored = _mirrored(call, unit_x)
            if mirrored is not None:
                own = mirrored.forward()
            else:
                own = state_of(call.first_look, unit_x, unit_y, call.backend)
            del mirrored
            saved = state = call.tile.all_reduce(own)
        loss = call.tile.finish(state)
        if call.weights is not None:
            loss = (loss * call.weights).sum()
        dtype = call.tile.loss_dtype(call.x)
        return _returned(call, loss.to(dtype, copy=True), saved)


def _as_returned(call, grads, dtype):
    """The gradients of `whole_gradients` as `forward` returns them, empty where not wanted."""
    *sides, numbers = grads
    for place, want in enumerate(call.wants[:2]):
        if not want:
            sides[place] = call.x.new_empty(0, dtype=dtype)
    if numbers is None:
        numbers = call.x.new_zeros(2, dtype=wide_dtype(call.x.device))
    return *sides, numbers


def _returned(call, loss, saved):
    """What `forward` returns."""
    seen = () if call.seen is None else (call.seen,)
    return [loss, *(saved if any(call.wants) else ()), *seen]


def at_once(call):
    """Whether one fused pass of a block of whole rows gives its state and its score gradients."""
    rows, columns, device = call.x.shape[0], call.y.shape[0], call.x.device
    if not call.backend.whole_rows_fit(columns, device):
        return False
    return call.tile.rows_alone or call.backend.whole_matrix_fits(rows, columns, device)


def _whole_rows(call):
    """Blocks of whole rows; the whole matrix where a row alone does not decide."""
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
    wanted = call.products[0] or not any(call.wants)
    if not call.together or not wanted or call.seen is not None:
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
    """dL/dx and dL/dy in `dtype`, empty where not wanted, dL/dscale and dL/dbias (2,).

    grad_losses: dL/dloss of each row; factor: what the gradients of the unit rows still lack.
    """
    grads, along = [], None  # of unit rows, by row: their products with their gradients
    backend = call.backend
    rows_backward = backend.tile_rows_backward if call.tile.cosine else backend.dot_rows_backward
    sides = zip((call.x, call.y), unit_grads, inverses, call.wants[:2], strict=True)
    for values, unit_grad, inverse, want in sides:
        grad = values.new_empty(values.shape if want and not len(values) else 0, dtype=dtype)
        if unit_grad.numel():
            found, along = rows_backward(unit_grad, values, inverse, factor, dtype)
            # Rows whose gradient is not wanted may be here for the gradient of the scale alone.
            grad = found if want else grad
        grads.append(grad)
    parameters = inverses[0].new_zeros(2, dtype=wide_dtype(call.x.device))
    if call.wants[2]:
        # Together, dunit_x holds the rows' and the columns' share of the same sum.
        if along is not None:
            total = factor * widened(along).sum()
            parameters[0] = total / ((1 + call.together) * call.scale)
        doubled = None if grad_losses is None else widened(grad_losses)
        parameters[0] += call.tile.record.scale_gradient(call.tile, state, doubled)
    if call.wants[3]:
        parameters[1] = call.tile.record.bias_gradient(call.tile, state, grad_losses)
    return *grads, parameters


def backward(grad, state, *arguments):
    """[dL/dx, dL/dy, dL/dscale and dL/dbias] from the state that the forward pass kept."""
    call = Call(TileArguments(*arguments))
    call.weigh_rows()
    with without_autocast(call.x.device.type):
        # That of a sum is one number for all rows, in the place of each.
        grad = grad.contiguous()
        grad_losses = grad if call.weights is None else grad * call.weights
        grad_losses = call.tile.own_gradient(grad_losses)
        unit_x, unit_y, *inverses = call.units()
        dtype = inverses[0].dtype
        coefficients, factor = call.coefficients(state, grad_losses, dtype)
        # In the order of the forward pass before it, so that the allocator finds its places
        # again.
        panels = _mirrored(call, unit_x)
        if panels is not None:
            grad = panels.gradient(coefficients, dtype)
            unit_grads = grad, grad.new_empty(0)
        else:
            panels = call.backend.workspace(unit_x, unit_y)
            unit_grads = _score_grad_panels(call, unit_x, unit_y, coefficients, dtype, panels)
        del unit_x, unit_y, panels  # before the results are made of their gradients
        return list(
            _input_gradients(call, state, grad_losses, unit_grads, inverses, factor, call.x.dtype)
        )

"""The steps of a pass: what happens to a panel between its products, for any kind of loss.

A step takes a `Block` whose panel holds scores. It runs as single torch operations, or compiled
into one or two (compiled.py).
"""

from fastsim.backends.torch import compiled
from fastsim.backends.torch.epilogues import EPILOGUES, FEW, narrowed


def forward(tile, block, sums):
    """The state of the panel; its scores may be overwritten.

    sums: the first two parts over all columns, or None.
    """
    state = _compiled_forward(tile, block, sums or ())
    return _forward(tile, block, sums) if state is None else state


def score_grad(tile, block, coefficients, out):
    """Writes the score gradients to `out`, the panel itself or another matrix."""
    if compiled.attempt(_score_grad, tile, block, coefficients, out) is None:
        _score_grad(tile, block, coefficients)
        _hand_over(block, out)


def fused(tile, block, weights, out):
    """The state of whole rows or of the whole matrix; writes the score gradients to `out`.

    weights: those of the losses, or None.
    """
    if tile.record.elementwise:
        state = compiled.attempt(_fused, tile, block, (weights,), out)
    else:
        # Two steps. The coefficients between them are not compiled: if two rows have the same
        # positive, a compiler would add up their weights in any order.
        state = _compiled_forward(tile, block)
        if state is not None:
            weights = 1.0 if weights is None else weights.to(state[0].dtype)
            coefficients = narrowed(tile.coefficients(state, weights), block.panel)
            score_grad(tile, block, coefficients, out)
    if state is None:
        state = _fused(tile, block, (weights,))
        _hand_over(block, out)
    return state


def _compiled_forward(tile, block, sums=()):
    """`_forward` through `compiled.attempt`."""
    # Sums over many levels are scattered; a compiler would add in any order.
    if tile.levels is not None and len(tile.levels) > FEW:
        return None
    return compiled.attempt(_forward, tile, block, sums)


def _hand_over(block, out):
    if out is not block.panel:
        out.copy_(block.panel)


def _prepared(tile, block):
    """The epilogue of the tile, after the scores have been made ready for it."""
    block.leave_out()
    if block.bias is not None:
        block.panel.add_(block.bias)
    epilogue = EPILOGUES[tile.kind]
    epilogue.prepare(tile, block)
    return epilogue


def _forward(tile, block, sums):
    return _prepared(tile, block).forward(tile, block, sums or None)


def _score_grad(tile, block, coefficients):
    _prepared(tile, block).score_grad(tile, block, coefficients)
    return []


def _fused(tile, block, inputs):
    return _prepared(tile, block).fused(tile, block, *inputs)

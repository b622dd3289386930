"""What happens to a panel between its products: the steps of a pass, for any kind of loss.

A step takes a `Block` whose panel holds scores. Each is done by torch operations one after another,
or compiled into one or two (compiled.py).
"""

from fastsim.backends.torch import compiled
from fastsim.backends.torch.epilogues import EPILOGUES, FEW, narrowed


def forward(tile, block, sums):
    """The state of the panel, whose scores may be lost; sums: the first two parts over all columns,
    or None.
    """
    state = _compiled_forward(tile, block, sums or ())
    return _forward(tile, block, sums) if state is None else state


def score_grad(tile, block, coefficients, out):
    """The scores become score gradients in `out`, the panel itself or another matrix."""
    if compiled.attempt(_score_grad, tile, block, coefficients, out) is None:
        _score_grad(tile, block, coefficients)
        _hand_over(block, out)


def fused(tile, block, weights, out):
    """Both, of whole rows or of the whole matrix; weights: of the losses, or None."""
    if tile.record.elementwise:
        state = compiled.attempt(_fused, tile, block, (weights,), out)
    else:
        # Two steps, with the coefficients between them as they are: where two rows have one
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
    """`_forward` as `compiled.attempt` does it."""
    # Many levels are scattered, which a compiler would do in any order.
    if tile.levels is not None and len(tile.levels) > FEW:
        return None
    return compiled.attempt(_forward, tile, block, sums)


def _hand_over(block, out):
    if out is not block.panel:
        out.copy_(block.panel)


def _prepared(tile, block):
    """The epilogue, after the scores have been changed that it is not to see."""
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


def _fused(tile, block, given):
    return _prepared(tile, block).fused(tile, block, *given)

"""Ours beside a peer's losses: its code in float64 is the truth.

Ours may be off it by twice what theirs is in float32, and by twice what the rounding of scores does
to the truth (measure.py).
"""

import functools

import torch

from tests.measure import assert_close, conditioning


def results(call, tensors, dtype=torch.float64, *, unused=False):
    """[loss, gradients] of call(*tensors) with everything floating in dtype.

    unused: whether a tensor may have no part in the loss; its gradient is then 0.
    """
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    value = call(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=unused)
    found = zip(grads, leaves, strict=True)
    return [value.detach(), *(torch.zeros_like(x) if g is None else g for g, x in found)]


def compare(ours, theirs, tensors, *, unused=False):
    """ours, theirs: functions of the tensors; value and gradients."""
    mine, dense = (results(call, tensors, torch.float32, unused=unused) for call in (ours, theirs))
    exact = functools.partial(results, theirs, unused=unused)
    truth = exact(tensors)
    moves = conditioning(exact, [t.double() for t in tensors])
    eps = torch.finfo(torch.float32).eps
    for index, (*parts, move) in enumerate(zip(mine, truth, dense, moves, strict=True)):
        assert_close(f"part {index}", *parts, torch.float32, moved=eps * move, independent=True)

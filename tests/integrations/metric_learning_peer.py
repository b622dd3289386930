"""pytorch-metric-learning's losses and ours beside them: its code in float64 is the truth.

Ours may be off it by twice what theirs is in float32, and by twice what the rounding of scores does
to the truth (measure.py). A warning is an error in these tests.
"""

import pytest
import torch

from tests.measure import assert_close, conditioning
from tests.seeds import fresh

pytest.importorskip("pytorch_metric_learning", reason="pytorch-metric-learning is not installed")
import pytorch_metric_learning.losses as their_losses
import pytorch_metric_learning.miners as their_miners
from pytorch_metric_learning import distances, reducers, regularizers

from fastsim.integrations.pytorch_metric_learning import losses, miners

__all__ = [
    "distances",
    "losses",
    "miners",
    "reducers",
    "regularizers",
    "their_losses",
    "their_miners",
]

ROWS, REFERENCES, WIDTH, CLASSES = 33, 47, 12, 7
PAIR_LOSSES = {
    "NTXentLoss": [{}, {"temperature": 0.5}],
    "SupConLoss": [{}, {"temperature": 0.5}],
    "MultiSimilarityLoss": [{}, {"alpha": 5, "beta": 20.0, "base": 0.1}],
    "CircleLoss": [{}, {"m": 0.25, "gamma": 20}],
}


def batch(rows=ROWS, seed=3):
    generator = fresh(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


def results(call, tensors, dtype):
    """[loss, gradients] of call(*tensors) with everything floating in dtype."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    value = call(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    found = zip(grads, leaves, strict=True)
    return [value.detach(), *(torch.zeros_like(x) if g is None else g for g, x in found)]


def compare(ours, theirs, tensors):
    """ours, theirs: functions of the tensors."""
    mine = results(ours, tensors, torch.float32)
    dense = results(theirs, tensors, torch.float32)

    def exact(leaves):
        return results(theirs, leaves, torch.float64)

    truth = exact(tensors)
    moves = conditioning(exact, [t.double() for t in tensors])
    eps = torch.finfo(torch.float32).eps
    for index, (*parts, move) in enumerate(zip(mine, truth, dense, moves, strict=True)):
        assert_close(f"part {index}", *parts, torch.float32, moved=eps * move)

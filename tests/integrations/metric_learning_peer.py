"""pytorch-metric-learning's losses and ours beside them. A warning is an error in these tests."""

import functools

import pytest
import torch

from tests.integrations import beside
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


def double(kind, monkeypatch):
    """Patch their class `kind` so that its losses are twice what they were."""
    owner = next(base for base in kind.__mro__ if "compute_loss" in vars(base))
    shipped = owner.compute_loss

    def doubled(self, *given):
        found = shipped(self, *given)
        return {name: {**part, "losses": 2 * part["losses"]} for name, part in found.items()}

    monkeypatch.setattr(owner, "compute_loss", doubled)


compare = functools.partial(beside.compare, unused=True)

"""torch.compile of the eager formulas, for any size at once."""

import functools

import torch

from fastsim.benchmark.baselines.baseline import Baseline
from fastsim.benchmark.baselines.eager import FORMULAS, bound


@functools.cache
def compiled(formula):
    return torch.compile(formula, dynamic=True)


def _make(formula):
    return lambda problem: bound(compiled(formula))(problem)


# A list's formula over all pairs is no contestant at the sizes of lists.
_LOSSES = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")

BASELINE = Baseline(
    "torch.compile", "torch", {name: _make(FORMULAS[name]) for name in _LOSSES}, up_to=8192
)

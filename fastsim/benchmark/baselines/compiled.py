"""The eager formulas under torch.compile, compiled once for all sizes."""

import functools

import torch

from fastsim.benchmark.baselines.baseline import Baseline
from fastsim.benchmark.baselines.eager import FORMULAS, bind_formula


@functools.cache
def compiled(formula):
    return torch.compile(formula, dynamic=True)


def _make(formula):
    return lambda problem: bind_formula(compiled(formula))(problem)


# Losses of lists are left out: their formula over all pairs cannot compete at the sizes of lists.
_LOSSES = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")

BASELINE = Baseline(
    "torch.compile", "torch", {name: _make(FORMULAS[name]) for name in _LOSSES}, up_to=8192
)

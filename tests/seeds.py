"""The seed of a run: all random inputs follow from it, those of processes that tests start too.

Inputs differ from run to run, but not in CI. A test that fails shows FASTSIM_SEED; set it to have
the same inputs again.
"""

import os
import random

import torch

_FRESH = 1 if "CI" in os.environ else random.SystemRandom().randrange(2**31)
SEED = int(os.environ.setdefault("FASTSIM_SEED", str(_FRESH)))


def seed_of(place):
    """A seed of its own for each place, a number, and for each run."""
    return SEED * 1_000_003 + place


def fresh(place=0):
    """A generator seeded so."""
    return torch.Generator().manual_seed(seed_of(place))

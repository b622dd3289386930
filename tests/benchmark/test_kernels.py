"""Baselines whose kernels are a GPU's, run by Triton's interpreter: they compute what we do."""

import importlib.util
import os
import subprocess
import sys

import pytest

LOSSES = {"memeff": 2, "siglip_kernel": 3}
CASES = "info_nce", "info_nce symmetric", "siglip", "siglip groups", "siglip weighed"
FOUND = [name for name in LOSSES if importlib.util.find_spec(name)]

CODE = f"""
import random, sys, warnings
warnings.simplefilter("ignore")
import torch
from bench import parity
from tests.measure import assert_close
torch.set_num_threads(1)
chance, found = random.Random(int(sys.argv[1])), 0
for case, peer in parity.pairs():
    if case.name not in {CASES}:
        continue  # what a sum of another form may be off by is not derived
    found += 1
    name, ours = parity.replaced(case, peer)
    problem = parity.drawn(case, torch.float32, chance)
    exact = parity.exact(case, peer)
    truth = parity.outputs(exact, problem.to(torch.float64))
    dense = parity.outputs(exact, problem.to(torch.float32))
    # What the sums are made of: logits of a row, and their slopes over the shortest row.
    scale = problem.options.get("scale") or 1 / problem.options["temperature"]
    shortest = min(leaf.norm(dim=1).min().item() for leaf in problem.leaves)
    sizes = scale + 10, scale / problem.rows / shortest, scale / problem.rows / shortest
    for make in (peer.call, ours):
        got = parity.outputs(make, problem.to(torch.float32))
        for what, *parts, size in zip(("value", "x", "y"), got, truth, dense, sizes):
            assert_close(f"{{peer.name}} {{case.name}} {{what}}", *parts, torch.float32, size)
print(found)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not FOUND, reason="no such kernels here"
)
def test_kernels_of_other_packages():
    """Truth is the dense formula in float64, whose error in float32 the tolerance is made of."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, os.environ.get("FASTSIM_SEED", "0")],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == sum(LOSSES[name] for name in FOUND)

"""Baselines whose kernels are a GPU's, run by Triton's interpreter: they compute what we do."""

import importlib.util
import os
import subprocess
import sys

import pytest

LOSSES = {"memeff": 6, "siglip_kernel": 3}
FOUND = [name for name in LOSSES if importlib.util.find_spec(name)]

CODE = """
import random, sys, warnings
warnings.simplefilter("ignore")
import torch
from bench import kernel_cases, parity
from tests.measure import assert_close
torch.set_num_threads(1)
chance, found = random.Random(int(sys.argv[1])), 0
for case, peer in parity.pairs():
    if case.name == "margin mask":
        continue  # a cosine within rounding of the margin is on either side
    found += 1
    name, ours = parity.replacement(case, peer)
    problem = parity.random_problem(case, torch.float32, chance)
    exact = parity.exact(case, peer)
    truth = parity.outputs(exact, problem.to(torch.float64))
    dense = parity.outputs(exact, problem.to(torch.float32))
    # A kernel's exponent is a logit's distance from the largest that a cosine gives: its rounding
    # is the relative error of the exponential, and so of what it adds to a gradient. That is a
    # row's share of the mean over the length of the shortest row, of the shortest prefix. The
    # terms of a row of SigLIP are summed, those of a softmax have the sum 1.
    scale = problem.options.get("scale") or 1 / problem.options["temperature"]
    exponent = 2 * scale + abs(problem.options.get("bias", 0.0)) + 1
    prefixes = (leaf[:, :kernel_cases.WIDTHS[0]] for leaf in problem.leaves)
    shortest = min(prefix.norm(dim=1).min().item() for prefix in prefixes)
    exponent *= problem.rows if case.name.startswith("siglip") else 1
    sizes = exponent, *[exponent * scale / problem.rows / shortest] * 2
    for make in (peer.call, ours):
        got = parity.outputs(make, problem.to(torch.float32))
        for what, *parts, size in zip(("value", "x", "y"), got, truth, dense, sizes):
            assert_close(f"{peer.name} {case.name} {what}", *parts, torch.float32, size)
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

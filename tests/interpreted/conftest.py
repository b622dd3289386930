"""Tests of the Triton kernels under its interpreter, on CPU tensors.

Triton decides at import whether it interprets, so tests/test_triton.py runs this folder in a
process of its own with TRITON_INTERPRET=1; elsewhere nothing here is collected.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def fresh_inputs(request):
    """Inputs differ from run to run; a failure says how to have them again."""
    seed = int(os.environ.get("FASTSIM_SEED") or torch.seed() % 2**31)
    torch.manual_seed(seed)
    request.node.user_properties.append(("seed", seed))
    print(f"FASTSIM_SEED={seed}")  # shown for a test that fails

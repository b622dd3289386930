"""Tests of the CUDA kernels in an emulator, on CPU tensors.

An emulated library stands in for the real one, so test_emulator.py runs test_emulated.py in a
process of its own with FASTSIM_EMULATED=<library>; elsewhere it is not collected.
"""

import os

import pytest
import torch

from fastsim.backends.cuda import backend as cuda
from fastsim.backends.cuda import passes as cuda_passes
from tests.backends.cuda.emulator.build import MISSING
from tests.backends.refusals import skip_expected

if library := os.environ.get("FASTSIM_EMULATED"):
    torch.ops.load_library(library)
    cuda.CudaBackend.unsupported_reason = lambda self, *tensors, kind=None: None
    cuda_passes.stream = lambda tensor: 0
else:
    collect_ignore = ["test_emulated.py", *(["test_emulator.py"] if MISSING else [])]


def pytest_report_collectionfinish():
    return [f"left out: the emulated CUDA kernels, {MISSING}"] if MISSING else []


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What the backend refuses by design is skipped with its own words."""
    try:
        return (yield)
    except RuntimeError as error:
        skip_expected(error, "cuda")

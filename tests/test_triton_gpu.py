"""The Triton backend on a GPU: bench/gpu.py holds the checks, every loss once here."""

import pytest
import torch

gpu = pytest.importorskip("bench.gpu")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")


@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize("name", gpu.CASES)
def test_error(name, dtype):
    shape = (1000, 1000, 100) if name == "sup_con" else gpu.RAGGED
    assert gpu.errors(name, shape, dtype)["passed"]


@pytest.mark.parametrize("name", gpu.CASES)
def test_repeats(name):
    assert gpu.repeats(name)["passed"]


@pytest.mark.parametrize("name", gpu.CASES)
def test_captures(name):
    assert gpu.captures(name)["passed"]


@pytest.mark.parametrize("name", gpu.CASES)
def test_compiles_whole(name):
    call = gpu.functools.partial(gpu.CASES[name][0], backend="triton")
    x, y = gpu.inputs(512, 512, 96, torch.bfloat16)
    plain = gpu.outputs(call, x, y)
    whole = gpu.outputs(torch.compile(call, fullgraph=True), x, y)
    assert all(map(torch.equal, plain, whole))


@pytest.mark.parametrize("name", gpu.CASES)
def test_no_wait_for_the_device(name):
    call = gpu.functools.partial(gpu.CASES[name][0], backend="triton")
    x, y = gpu.inputs(512, 512, 96, torch.bfloat16)
    gpu.step(call, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.step(call, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")

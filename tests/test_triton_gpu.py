"""The Triton backend on a GPU: bench/gpu.py holds the checks, every loss once here."""

import functools
import importlib

import pytest
import torch
from click.testing import CliRunner

gpu = pytest.importorskip("bench.gpu")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")


@needs_gpu
@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize("name", gpu.CASES)
def test_error(name, dtype):
    for shape in gpu.shapes(name):
        assert gpu.errors(name, "triton", shape, dtype)["passed"]


@needs_gpu
@pytest.mark.parametrize("name", gpu.CASES)
def test_repeats(name):
    assert gpu.repeats(name, "triton")["passed"]


@needs_gpu
@pytest.mark.parametrize("name", gpu.CASES)
def test_captures(name):
    assert gpu.captures(name, "triton")["passed"]


@needs_gpu
@pytest.mark.parametrize("name", gpu.CASES)
def test_compiles_whole(name):
    call = functools.partial(gpu.CASES[name].call, backend="triton")
    x, y = gpu.inputs(512, 512, 96, torch.bfloat16)
    plain = gpu.outputs(call, x, y)
    whole = gpu.outputs(torch.compile(call, fullgraph=True), x, y)
    assert all(map(torch.equal, plain, whole))


@needs_gpu
@pytest.mark.parametrize("name", gpu.CASES)
def test_no_wait_for_the_device(name):
    call = functools.partial(gpu.CASES[name].call, backend="triton")
    x, y = gpu.inputs(512, 512, 96, torch.bfloat16)
    gpu.step(call, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.step(call, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
@pytest.mark.parametrize(("module", "what"), [("gpu", "measured"), ("tune_triton", "tuned")])
def test_without_a_gpu_a_command_says_so_in_one_line(module, what):
    if module == "tune_triton":
        pytest.importorskip("triton")
    done = CliRunner().invoke(importlib.import_module(f"bench.{module}").main)
    assert done.exit_code == 1
    assert done.output.strip() == f"Error: no GPU is visible; nothing was {what}"

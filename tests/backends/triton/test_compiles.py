"""The Triton backend: its interpreter tests in a process of their own, and compilation."""

import importlib.util
import itertools
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fastsim.backends import get, pick
from fastsim.backends.triton import backend as triton
from fastsim.backends.triton.backend import TritonBackend
from fastsim.cli.info import report

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_under_the_interpreter():
    """tests/backends/triton/interpreted, which says why."""
    folder = Path(__file__).parent / "interpreted"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_import_leaves_triton_alone():
    code = "import sys, fastsim, fastsim.backends; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_unsupported_reason_without_a_gpu():
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the interpreter serves CPU tensors")
    assert get("triton").unsupported_reason() is not None
    assert get("triton").unsupported_reason(torch.zeros(1)) is not None


def test_info_says_that_a_gpu_is_unverified(monkeypatch):
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda self, *tensors, kind=None: None)
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    line = next(line for line in report().splitlines() if "triton" in line)
    assert line.split(maxsplit=1)[1] == (
        "usable, unverified on this device (NVIDIA H200): `auto` leaves it out,"
        ' backend="triton" asks for it'
    )
    assert pick(None, torch.empty(1, device="meta")).name == "torch"


# Of the report's cases those that together have every kernel and every epilogue.
CASES = (
    "exclude",
    "dense",
    "multi_positive",
    "multi_similarity",
    "sigmoid dense",
    "squared_error integers",
    "levels once",
    "softmax alone",
    "rows",
)
ARCHITECTURES, OPERANDS = ("sm_90", "sm_80", "gfx942"), ("float16", "tf32", "float32")
COMPILED = list(itertools.product(ARCHITECTURES, OPERANDS))
# What the products of a tile are made of; full float32 has tensor cores on AMD alone.
PRODUCTS = {
    ("sm_90", "float16"): "wgmma",
    ("sm_90", "tf32"): "wgmma",
    ("sm_80", "float16"): "mma.sync",
    ("sm_80", "tf32"): "mma.sync",
    **{("gfx942", operand): "v_mfma" for operand in OPERANDS},
}


# Epilogues that spill registers under one version of Triton, on NVIDIA: the block sizes of
# kernels/table.py fit the versions before and after it.
SPILLS = {("3.8", "float16"): ("contrast_forward", "hardest_forward", "softmax_forward")}


def triton_version():
    """The version of Triton, of which the first two numbers count."""
    return ".".join(metadata.version("triton").split(".")[:2])


@pytest.fixture(scope="module")
def compilations():
    """Per architecture and operand the futures of its cases."""
    from bench.compile_report import compiling

    with compiling(COMPILED, CASES) as futures:
        yield futures


@needs_triton
@pytest.mark.parametrize(("architecture", "operand"), COMPILED)
def test_compiles(architecture, operand, compilations):
    compiled = [row for future in compilations[architecture, operand] for row in future.result()]
    tiles = [row for row in compiled if row.kernel == "tile_kernel"]
    assert {row.epilogue for row in tiles} == {
        "softmax_forward",
        "softmax_score_grad",
        "sigmoid_forward",
        "sigmoid_score_grad",
        "sigmoid_forward+sigmoid_score_grad",
        "squared_error_forward",
        "squared_error_score_grad",
        "squared_error_forward+squared_error_score_grad",
        "levels_forward",
        "levels_score_grad",
        "contrast_forward",
        "multi_similarity_score_grad",
        "multi_positive_forward",
        "multi_positive_score_grad",
        "closest_forward",
        "hardest_forward",
    }
    assert {row.kernel for row in compiled} == {
        "tile_kernel",
        "unit_rows_kernel",
        "unit_rows_backward_kernel",
        "merge_exponentials_kernel",
        "positives_kernel",
        *(("kept_score_grads_kernel",) if operand == "float16" else ()),
        "totals_kernel",
        "carries_kernel",
        "scan_kernel",
    }
    known = SPILLS.get((triton_version(), operand), ()) if architecture != "gfx942" else ()
    spilled = [row[:-2] for row in compiled if row.spills and row.epilogue not in known]
    assert not spilled
    product = PRODUCTS.get((architecture, operand), "fma")
    assert all(product in row.assembly for row in tiles)
    if product == "wgmma":
        assert all("cp.async.bulk.tensor" in row.assembly for row in tiles)

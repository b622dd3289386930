"""The Triton backend: its interpreter tests in a process of their own, and compilation."""

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from fastsim.backends import get, pick, triton
from fastsim.backends.triton import TritonBackend
from fastsim.info import report

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_under_the_interpreter():
    """tests/interpreted, which says why."""
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
def test_objection_without_a_gpu():
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the interpreter serves CPU tensors")
    assert get("triton").objection() is not None
    assert get("triton").objection(torch.zeros(1)) is not None


def test_info_says_that_a_gpu_is_unverified(monkeypatch):
    monkeypatch.setattr(TritonBackend, "objection", lambda self, *tensors: None)
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    line = next(line for line in report().splitlines() if "triton" in line)
    assert line.split(maxsplit=1)[1] == (
        "usable, unverified on this device (NVIDIA H200): `auto` leaves it out,"
        ' backend="triton" asks for it'
    )
    assert pick(None, torch.empty(1, device="meta")).name == "eager"


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
# Elsewhere the other operands differ in the product alone, so one case shows that it builds; the
# report has all of them.
ONE = ("sigmoid dense",)
COMPILED = {
    ("sm_90", "float16"): CASES,
    ("sm_90", "tf32"): CASES,
    ("sm_90", "float32"): CASES,
    ("sm_80", "float16"): CASES,
    ("sm_80", "tf32"): ONE,
    ("sm_80", "float32"): ONE,
    ("gfx942", "float16"): CASES,
    ("gfx942", "tf32"): ONE,
    ("gfx942", "float32"): ONE,
}


@pytest.fixture(scope="module")
def compilations():
    """Per architecture and operand the futures of its cases, on as many processes as cores."""
    from bench.compile_report import compile_named

    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    yield {
        key: [pool.submit(compile_named, *key, name) for name in names]
        for key, names in COMPILED.items()
    }
    pool.shutdown(cancel_futures=True)


@needs_triton
@pytest.mark.parametrize(("architecture", "operand"), COMPILED)
def test_compiles(architecture, operand, compilations):
    compiled = [row for future in compilations[architecture, operand] for row in future.result()]
    tiles = [row for row in compiled if row.kernel == "tile_kernel"]
    assert tiles
    if COMPILED[architecture, operand] == CASES:
        assert {row.epilogue for row in tiles} == {
            "softmax_fold",
            "softmax_slope",
            "sigmoid_fold",
            "sigmoid_slope",
            "sigmoid_fold+sigmoid_slope",
            "squared_error_fold",
            "squared_error_slope",
            "squared_error_fold+squared_error_slope",
            "levels_fold",
            "levels_slope",
            "contrast_fold",
            "multi_similarity_slope",
            "multi_positive_fold",
            "multi_positive_slope",
            "closest_fold",
            "hardest_fold",
        }
        assert {row.kernel for row in compiled} > {
            "unit_rows_kernel",
            "unit_rows_backward_kernel",
            "merge_exponentials_kernel",
            "positives_kernel",
            *(("kept_slopes_kernel",) if operand == "float16" else ()),
            "totals_kernel",
            "carries_kernel",
            "scan_kernel",
        }
    spilled = [row[:-1] for row in compiled if row.spills]
    assert not spilled
    if architecture == "sm_90" and operand != "float32":
        assert all("cp.async.bulk.tensor" in row.assembly for row in tiles)
        assert all("wgmma" in row.assembly for row in tiles)

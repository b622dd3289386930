"""The CUDA extension without a GPU: what was built, what it refuses, and its layout."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import cuda_report
from fastsim.backends import get
from fastsim.backends.cuda import backend as cuda
from fastsim.backends.cuda import passes as cuda_passes
from fastsim.backends.triton.backend import TritonBackend
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss

ROOT = Path(__file__).parents[3]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="session")
def built():
    """The library, or a skip with the reason."""
    if shutil.which("nvcc") is None and not cuda.LIBRARY.exists():
        pytest.skip("no nvcc, so no CUDA library")
    if not cuda.LIBRARY.exists():
        pytest.skip("the CUDA library was not asked for (FASTSIM_BUILD=cuda)")
    return cuda.LIBRARY


@pytest.fixture(scope="session")
def found(built):
    if cuda_report.tool("cuobjdump") is None:
        pytest.skip("no cuobjdump")
    return cuda_report.kernels(built)


EPILOGUES = {
    "SoftmaxForward",
    "SoftmaxScoreGrad",
    "SigmoidPass",
    "SquaredErrorPass",
    "LevelsForward",
    "LevelsScoreGrad",
    "ClosestForward",
    "Diagonal",
}


def test_no_kernel_spills(found):
    architectures = {kernel.architecture for kernel in found}
    if not architectures >= {"sm_80", "sm_90a"}:
        pytest.skip(f"built for {architectures}")
    tiles = [kernel for kernel in found if kernel.tiles]
    for engine, architecture, product in (
        ("hopper", "sm_90a", "Half"),
        ("portable", "sm_80", "Half"),
        ("portable", "sm_80", "Tf32"),
        ("portable", "sm_80", "Full"),
        ("portable", "sm_90a", "Tf32"),
        ("portable", "sm_90a", "Full"),
    ):
        key = (architecture, engine, product)
        assert {kernel.epilogue for kernel in tiles if kernel[:3] == key} == EPILOGUES
    spilled = [kernel for kernel in found if kernel.local or (kernel.tiles and kernel.stack)]
    assert not spilled
    # One multiplies under the other's epilogue; on sm_90a the groups of one block do.
    pairs = [kernel for kernel in tiles if kernel.engine == "portable" and kernel.product != "Full"]
    assert pairs
    assert all(kernel.blocks == 2 for kernel in pairs)


def test_hopper_code_has_its_instructions(found, built):
    if "sm_90a" not in {kernel.architecture for kernel in found}:
        pytest.skip("not built for sm_90a")
    text = cuda_report.dump("--dump-sass", "--gpu-architecture", "sm_90a", library=built)
    functions = [part for part in text.split("Function : ")[1:] if "hopper_tiles" in part[:200]]
    assert len(functions) == len(EPILOGUES)
    for part in functions:
        name = part.split("\n")[0]
        # Eight products of 64 x 128 x 16 a step, waited for together, never one by one.
        assert part.count("HGMMA.64x128x16.F32") == 8, name
        assert part.count("WARPGROUP.DEPBAR") == 2, name
        assert "UTMALDG.2D" in part, name
        assert "UTMALDG.2D.MULTICAST" in part, name
        assert "USETMAXREG" in part, name
        if any(score_grad in name for score_grad in ("ScoreGrad", "Both")):
            assert "UTMASTG.2D" in part, name


def test_what_the_other_engine_serves_is_an_error(found, built):
    """Code that writes nothing would leave what was in the outputs."""
    architectures = {kernel.architecture for kernel in found}
    if not architectures >= {"sm_80", "sm_90a"}:
        pytest.skip(f"built for {architectures}")
    for architecture, wanted in (("sm_80", "hopper_tiles"), ("sm_90a", "portable_tiles.*4HalfE")):
        text = cuda_report.dump("--dump-sass", "--gpu-architecture", architecture, library=built)
        parts = text.split("Function : ")[1:]
        left_out = [part for part in parts if re.match(f".*{wanted}", part)]
        assert left_out
        assert all("BPT.TRAP" in part for part in left_out)


def test_loads_and_refuses_cpu_tensors(built):
    # In a process of its own, so that nothing else has its symbols or its operators.
    code = f"""
import torch
torch.ops.load_library({str(built)!r})
x = torch.zeros(2, 64)
try:
    torch.ops.fastsim_cuda.unit_rows(x, x, None, "full", 0)
except NotImplementedError as error:
    assert "CPU" in str(error), error
    print("refused", torch.ops.fastsim_cuda.tile_size())
"""
    environment = os.environ | {"LD_BIND_NOW": "1"}  # an undefined symbol fails at once
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["refused", "128"], done.stderr


def test_unsupported_reason_is_a_sentence():
    backend = get("cuda")
    assert not backend.automatic
    assert "it serves GPU tensors" in backend.unsupported_reason(torch.zeros(1))
    if not torch.cuda.is_available():
        assert backend.unsupported_reason() is not None


def test_nothing_of_triton_runs_here():
    """What the backend inherits uses no kernel of the Triton backend."""
    for name, method in vars(TritonBackend).items():
        if inspect.isfunction(method):
            code = inspect.getsource(method)
            borrowed = any(use in code for use in ("_passes()", "_operands()", "_scan()"))
            assert not borrowed or name in vars(cuda.CudaBackend), name


def test_an_unknown_loss_is_refused():
    with pytest.raises(RuntimeError, match="'cuda' cannot be used: it has no kernels of kind"):
        cuda_passes.check_tile(TileLoss("odd", Pairs()))


def test_an_unknown_option_is_refused(monkeypatch):
    fewer = cuda_passes.KNOWN_FIELDS | {TileLoss: cuda_passes.KNOWN_FIELDS[TileLoss] - {"margin"}}
    monkeypatch.setattr(cuda_passes, "KNOWN_FIELDS", fewer)
    pairs = Pairs(torch.arange(3))
    cuda_passes.check_tile(TileLoss("softmax", pairs))
    with pytest.raises(RuntimeError, match="it does not know margin of softmax losses"):
        cuda_passes.check_tile(TileLoss("softmax", pairs, margin=0.5))


# ---- on the host ----


@needs_compiler
def test_layout(tmp_path):
    """tests/backends/cuda/layout.cpp: every index function against its definition."""
    program = tmp_path / "layout"
    source = ROOT / "tests/backends/cuda/layout.cpp"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", f"-I{ROOT}/csrc/cuda"]
    subprocess.run(["g++", *options, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""

"""The Triton backend: its interpreter tests in a process of their own, and compilation."""

import importlib.util
import os
import random
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fastsim.backends import get, pick
from fastsim.backends.triton import backend as triton
from fastsim.backends.triton import installed
from fastsim.backends.triton.backend import TritonBackend
from fastsim.backends.triton.kernels import table
from fastsim.cli.info import report
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from fastsim.verify import verdicts
from tests.seeds import SEED

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
    """And torch.compile, which imports it in later releases and takes a second itself."""
    code = (
        "import sys, fastsim, fastsim.backends\n"
        "assert not {'triton', 'torch._dynamo'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_unsupported_reason_without_a_gpu():
    if os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the interpreter serves CPU tensors")
    assert get("triton").unsupported_reason() is not None
    assert get("triton").unsupported_reason(torch.zeros(1)) is not None


def test_info_says_that_a_gpu_is_unverified(tmp_path, monkeypatch):
    monkeypatch.setenv(verdicts.CACHE, str(tmp_path))
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda self, *tensors, kind=None: None)
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    line = next(line for line in report().splitlines() if "triton" in line)
    assert line.split(maxsplit=1)[1] == (
        "usable, unverified on this device (NVIDIA H200): `auto` leaves it out,"
        ' backend="triton" asks for it'
    )
    assert pick(None, torch.empty(1, device="meta")).name == "torch"


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_info_says_what_the_verdicts_are(name, tmp_path, monkeypatch):
    """Those of this device and of the kernels as they are."""
    monkeypatch.setenv(verdicts.CACHE, str(tmp_path))
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(verdicts, "_of_device", lambda device: {"device": str(device)})
    asks = f'backend="{name}" asks for it'
    unverified = f", unverified on this device (NVIDIA H200): `auto` leaves it out, {asks}"
    assert get(name).note() == unverified
    for kind, ratio in (("softmax", 0.5), ("sigmoid", None), ("levels", 1.5), ("closest", 0.0)):
        right = kind != "closest"
        of = verdicts.key(name, kind, torch.float16, "cuda:0")
        verdicts.write(verdicts.now(right, None if right else "it lies", ratio, of))
    for other in ({"device": "cuda:1"}, {"backend": "other"}, {"kernels": "older"}):
        verdicts.write(verdicts.now(True, None, 0.5, of | other))
    said = f", `auto` takes it by 2 of 4 verdicts on this device (NVIDIA H200), {asks}"
    assert get(name).note() == said


@pytest.mark.parametrize("name", ["gfx90a", "gfx950", "gfx1100"])
def test_gpus_without_tf32(name, precision):
    """Of AMD's all but gfx942: there Triton refuses to compile such a product."""
    precision("high")
    assert table.operand_kind(torch.float32, name) == "float32"
    assert table.operand_kind(torch.float32, "gfx942") == "tf32"
    assert table.operand_kind(torch.float32, "sm_90") == "tf32"
    assert table.operand_kind(torch.float16, name) == "float16"


@pytest.mark.parametrize(
    ("version", "capability", "says"),
    [
        ("3.5.1", (9, 0), "it wants Triton 3.6 or later, got 3.5.1"),
        ("", (9, 0), "it wants Triton 3.6 or later, got one of unknown version"),
        ("3.10.0", (7, 5), "it wants compute capability 8.0 or later, got 7.5"),
        ("3.6.0", (8, 0), "torch's product of float16 matrices with a float32 result fails here"),
    ],
)
def test_unsupported_devices(version, capability, says, monkeypatch):
    monkeypatch.setattr(installed, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # A GPU that has no such product.
    monkeypatch.setattr(torch, "ones", lambda *shape, device, **options: torch.empty(*shape))
    monkeypatch.setattr(triton, "_wide_product", failing_product)
    monkeypatch.setattr(torch.version, "hip", None)
    assert triton._found_unsupported.__wrapped__(0, False).startswith(says)


def test_memory_that_is_short_is_no_reason_for_good(monkeypatch):
    """And what torch may add up in decides anew."""
    monkeypatch.setattr(installed, "version", lambda: "3.6.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "ones", lambda *shape, device, **options: torch.empty(*shape))
    monkeypatch.setattr(triton, "_wide_product", short_of_memory)
    triton._found_unsupported.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        triton._unsupported_device(0)
    monkeypatch.setattr(triton, "_wide_product", lambda *operands, accumulate: None)
    assert triton._unsupported_device(0) is None
    monkeypatch.setattr(triton, "_wide_product", failing_product)
    assert triton._unsupported_device(0) is None
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert "fails here: not implemented" in triton._unsupported_device(0)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
        triton._found_unsupported.cache_clear()


def short_of_memory(*operands, accumulate):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("package", ["triton", "pytorch-triton-rocm", None])
def test_the_version_of_a_package_of_another_name(package, monkeypatch):
    def version(name):
        if name != package:
            raise metadata.PackageNotFoundError(name)
        return "3.7.1"

    found = {"other": ["another"]} | ({"triton": [package]} if package else {})
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: found)
    assert installed.version.__wrapped__() == ("3.7.1" if package else "")


def failing_product(*operands, accumulate):
    raise RuntimeError("not implemented\nmore")


@pytest.mark.parametrize(("gigabytes", "rows"), [(16, 2816), (80, 10_240), (192, 11_264)])
def test_panels_by_the_memory_of_the_device(gigabytes, rows, monkeypatch):
    """A 64th of it, from 352 to 1,408 MB: so many rows of 65,536 scores of 16 bits."""
    monkeypatch.setattr(triton, "memory_of", lambda device: gigabytes << 30)
    blocks = get("triton").blocks(65_536, 65_536, torch.device("cuda"), whole_rows=True)
    assert next(iter(blocks)) == (slice(0, rows), slice(0, 65_536))


# Of the report's cases those that together have every kernel and every epilogue.
CASES = (
    "exclude, 2048",  # and all of "exclude"
    "dense",
    "decoupled",
    "multi_positive",
    "multi_similarity",
    "sigmoid dense",
    "squared_error integers",
    "levels once",
    "softmax alone",
    "sigmoid alone",
    "rows",
    "small batch",
)
EVERYTHING = [("sm_90", "float16")]
# Bytes of a thread: on sm_90 that few, once a tile, cost less than narrower parts (table.py).
SPILLS = {"sm_90": 32, "sm_80": 0, "gfx942": 0}
# Of which each run compiles one case, whose kernels may not spill.
SAMPLED = [("sm_80", "float16"), ("gfx942", "float16")]
# Of which it compiles a single kernel: there shows what products are made of, and if two blocks
# share a multiprocessor. All cases of all of these: python -m bench.compile_report.
SINGLE = [(name, kind) for name in ("sm_90", "sm_80", "gfx942") for kind in ("tf32", "float32")]
SINGLE += [(name, "float16") for name in ("sm_86", "sm_89", "sm_100", "sm_120", "gfx1100")]
SINGLE += [("gfx1100", "tf32")]  # which has no such products
OF_ONE_KERNEL = ("softmax forward", "sigmoid forward")


def product_of(architecture, operand):
    """What the products of a tile are made of; full float32 has tensor cores on gfx942 alone."""
    if architecture == "gfx942":
        return "v_mfma"
    if architecture.startswith("gfx"):
        return "v_wmma" if operand == "float16" else "v_dual_fma"
    if operand == "float32":
        return "fma"
    return {"sm_90": "wgmma", "sm_100": "tcgen05.mma"}.get(architecture, "mma.sync")


@pytest.fixture(scope="module")
def compilations(request):
    """Per architecture and operand the futures of its cases, of the tests that run."""
    from bench.compile_report import compiling

    drawn = random.Random(SEED)
    cases = dict.fromkeys(EVERYTHING, CASES)
    cases |= {key: (drawn.choice(CASES[:-2]),) for key in SAMPLED}
    cases |= {key: (drawn.choice(OF_ONE_KERNEL),) for key in SINGLE}
    tests = [test.callspec.params for test in request.session.items if hasattr(test, "callspec")]
    wanted = {(of.get("architecture"), of.get("operand")) for of in tests}
    with compiling({key: names for key, names in cases.items() if key in wanted}) as futures:
        yield futures


@needs_triton
@pytest.mark.parametrize(("architecture", "operand"), EVERYTHING + SAMPLED + SINGLE)
def test_compiles(architecture, operand, compilations):
    compiled = [row for future in compilations[architecture, operand] for row in future.result()]
    tiles = [row for row in compiled if row.kernel == "tile_kernel"]
    assert tiles
    product = product_of(architecture, operand)
    assert all(product in row.assembly for row in tiles)
    if product == "wgmma":
        assert all("cp.async.bulk.tensor" in row.assembly for row in tiles)
    if architecture in SPILLS and operand == "float16":
        assert not [row[:-2] for row in compiled if row.spills > SPILLS[architecture]]
    if operand == "float16":
        # Two of four warps share a multiprocessor: one multiplies under the other's epilogue.
        assert all(row.blocks >= (2 if row.warps == 4 else 1) for row in tiles)
    if (architecture, operand) not in EVERYTHING:
        return
    assert {row.epilogue for row in tiles} == {
        "softmax_forward",
        "softmax_score_grad",
        "sigmoid",
        "squared_error",
        "levels_forward",
        "levels_score_grad",
        "contrast_forward",
        "decoupled_forward",
        "decoupled_score_grad",
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
        "kept_score_grads_kernel",
        "totals_kernel",
        "carries_kernel",
        "scan_kernel",
        "unit_rows_of_both_kernel",
        "unit_rows_of_both_backward_kernel",
        "whole_kernel",
        "whole_columns_kernel",
    }
    assert {row.epilogue for row in compiled if row.kernel == "whole_kernel"} == {
        "softmax",
        "sigmoid",
        "triplet",
    }


@needs_triton
def test_compiled_once_for_any_batch():
    """Sizes that 16 divides or not, ones, and large ones; panels are read and written 16 bytes at
    a time.
    """
    from bench.compile_report import recording

    backend, scale = get("triton"), torch.tensor(10.0)
    sizes = (200, 300), (208, 304), (1, 1), (1, 7), (7, 1), (8192, 8191)
    found = {}
    with recording("sm_90") as launched:
        for rows, columns in sizes:
            x, y = (torch.zeros(n, 1280, dtype=torch.float16) for n in (rows, columns))
            block = slice(0, rows), slice(0, columns)
            unit_x, unit_y = (backend.unit_rows(side)[0] for side in (x, y))
            workspace = backend.workspace(unit_x, unit_y, whole_rows=True)
            pairs = Pairs(torch.zeros(rows, dtype=torch.int64))
            tile = TileLoss("softmax", pairs, scale, symmetric=True)
            backend.fused_pass(tile, unit_x, unit_y, block, torch.ones(rows), workspace)
    for kernel, constants, compiled in launched:
        name = kernel.fn.__name__, constants.get("EPILOGUE")
        found.setdefault(name, {})[compiled.hash] = compiled.asm["ptx"]
    assert {name: len(codes) for name, codes in found.items()} == dict.fromkeys(found, 1)
    assembly = {kernel: code for (kernel, _), codes in found.items() for code in codes.values()}
    assert "st.global.v4.b32" in assembly["tile_kernel"]
    assert "st.global.v4.b32" in assembly["kept_score_grads_kernel"]
    assert "ld.global.v4.b32" in assembly["kept_score_grads_kernel"]

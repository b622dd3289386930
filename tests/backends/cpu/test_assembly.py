"""The machine code of the CPU kernels: what the compiler made of the loops that do the work."""

import os
import platform
import re
import shutil
import subprocess
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fastsim
from fastsim.backends.cpu.library import LIBRARY

CSRC = Path(__file__).parents[3] / "csrc"
ARM = "aarch64-linux-gnu-"


ROWS = 6  # of a full tile


class Loop(NamedTuple):
    """How the loop over the depth looks: its products, and what may not be there.

    vectors: of a row of the full tile; the narrower ones have the same loop.
    additions: for each product, where that does not add itself.
    loads: of the left operand, for one step.
    """

    products: str
    vectors: int
    additions: int
    loads: float
    broadcast: str  # from a register: a scalar that was not multiplied as it came from memory
    stack: str


SETS = {
    "avx512": Loop(r"vfmadd\w+ps\s.*%zmm", 4, 0, ROWS, r"vbroadcasts\w+\s+%", "%[re][sb]p"),
    "avx2": Loop(r"vfmadd\w+ps\s.*%ymm", 2, 0, ROWS, r"vbroadcasts\w+\s+%", "%[re][sb]p"),
    # Without fused products, and with no broadcast from memory: shufps.
    "generic": Loop(r"mulps\s", 2, 1, ROWS, r"never", r"%rsp"),
    # A load of a row of the left operand serves four steps.
    "neon": Loop(r"fmla\s.*\.4s", 4, 0, ROWS / 4, r"dup\s", r"\bsp\b"),
}


# Of a library for this machine. Another compiler than that of CI may name or inline them otherwise.
BUILT = {"x86_64": ("avx512", "avx2", "generic"), "aarch64": ("neon",)}.get(platform.machine(), ())


VECTOR = r"(?:[xyz]mm|\b[vq])\d"


@lru_cache
def _functions(objdump, path):
    """[(demangled name, code)] of an object or a library."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = (part.strip().partition("\n") for part in text.split("\n\n"))
    return [(head, code) for head, _, code in parts]


@lru_cache
def _tiles(objdump, path):
    """(instruction set, vectors, [(address, instruction)]) of each tile of ROWS rows."""
    found = []
    for head, lines in _functions(objdump, path):
        name = re.match(rf"\w+ <void fastsim::(\w+)::.*\btile<float, {ROWS}, (\d)\b.*>:", head)
        if name:
            found.append((name[1], int(name[2]), _instructions(lines)))
    return found


def _instructions(code):
    """[(address, instruction)] of the code of a function."""
    rows = (re.match(r"\s*([0-9a-f]+):\s*(.*)", line) for line in code.split("\n"))
    return [(int(row[1], 16), row[2]) for row in rows if row]


def _innermost_loops(code):
    """The instructions of each loop that holds no other."""
    spans = []
    for address, instruction in code:
        jump = re.match(r"(?:j\w+|b\.\w+|cbn?z\s+\w+,)\s+([0-9a-f]+)", instruction)
        if jump and int(jump[1], 16) <= address:
            spans.append((int(jump[1], 16), address))
    for first, last in spans:
        inner = any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
        if not inner:
            yield [instruction for address, instruction in code if first <= address <= last]


def _loops(name, objdump, path):
    """{vectors: the loops over the depth} of the float32 tiles of an instruction set."""
    found = defaultdict(list)
    for instructions, vectors, code in _tiles(objdump, path):
        if instructions == name:
            for loop in _innermost_loops(code):
                if any(re.match(SETS[name].products, line) for line in loop):
                    found[vectors].append(loop)
    return found


def _skip(name, reason):
    """Skips a test of code that was not found; an error in CI, as a new name may be the cause."""
    assert not (name in BUILT and "CI" in os.environ)
    pytest.skip(reason)


@pytest.fixture(scope="module", params=SETS)
def tile(request, tmp_path_factory):
    """(what is expected, the loops) of an instruction set: of the library, or compiled for it."""
    name, loops = request.param, {}
    if fastsim.backends()["cpu"] is None and shutil.which("objdump"):
        loops = _loops(name, "objdump", LIBRARY)
    compiler = shutil.which(f"{ARM}g++")
    if name == "neon" and not loops and compiler:
        path = _compiled(compiler, tmp_path_factory.mktemp(name))
        loops = _loops(name, f"{ARM}objdump", path)
        assert loops
    if not loops:
        _skip(name, f"needs objdump and the C++ extension of its architecture, or {ARM}g++")
    assert sorted(loops) == [*range(1, SETS[name].vectors + 1)]
    return SETS[name], loops


def _compiled(compiler, folder):
    """The tile alone, by the flags of setup.py that matter to it."""
    source, target = folder / "tile.cpp", folder / "tile.o"
    source.write_text("""#include "cpu/products.h"
        namespace fastsim::neon {
        void use(const float* a, const float* b, int64_t n, float* c) {
          tile_of<float>(n, n, n > 1)(a, n, 1, b, n, n, c, n, {a, b, n});
        }
        }""")
    command = [compiler, "-std=c++20", "-O3", "-fPIC", "-fopenmp-simd", "-DFASTSIM_ISA=neon"]
    subprocess.run([*command, f"-I{CSRC}", "-c", source, "-o", target], check=True)
    return target


def test_the_hot_loop_multiplies_and_loads_alone(tile):
    """No addition of a zero, no broadcast from a register, no spill of a vector.

    They take the ports of the multiplier, or those of the loads.
    """
    expected, loops = tile
    every = [(vectors, loop) for vectors, found in loops.items() for loop in found]
    assert every
    for vectors, loop in every:
        products = [line for line in loop if re.match(expected.products, line)]
        assert products, loop
        assert len(products) % (ROWS * vectors) == 0, products
        additions = [
            line for line in loop if re.match(r"v?f?(add|sub)p?[sd]?\s.*(mm|[vs]\d)", line)
        ]
        assert len(additions) == len(products) * expected.additions, additions
        for line in loop:
            assert not re.match(expected.broadcast, line), line
            assert not re.search(rf"{VECTOR}.*{expected.stack}|{expected.stack}.*{VECTOR}", line)


def _loads(loop):
    """How many numbers or vectors a loop brings to vector registers."""
    x86 = sum(bool(re.match(r"\w+\s+\S*\(%.*mm\d", line)) for line in loop)
    arm = [line for line in loop if re.match(r"ld\w+\s.*[qdsv]\d", line)]
    return x86 + len(arm) + sum(line.startswith("ldp") for line in arm)


def test_the_hot_loop_loads_no_more_than_the_tile_takes(tile):
    """The longest of a tile's loops, beside which arm64 has one for what is left of the depth."""
    expected, loops = tile
    for vectors, found in loops.items():
        loop = max(found, key=len)
        steps = sum(bool(re.match(expected.products, line)) for line in loop) / (ROWS * vectors)
        assert _loads(loop) == (vectors + expected.loads) * steps, loop


def test_dot_products_keep_their_sums_in_registers():
    """Of AVX512_BF16: a load of each of two columns and of each row for two products of it."""
    if fastsim.backends()["cpu"] is not None or shutil.which("objdump") is None:
        pytest.skip("needs the C++ extension and objdump")
    name = r"fastsim::avx512_bf16::\(anonymous namespace\)::multiply_square<1, 1, false>"
    blocks = [code for head, code in _functions("objdump", LIBRARY) if re.search(name, head)]
    if not blocks:
        _skip("avx512", "needs a library for x86")
    found = [
        loop
        for code in blocks
        for loop in _innermost_loops(_instructions(code))
        if any(line.startswith("vdpbf16ps") for line in loop)
    ]
    assert found
    for loop in found:
        products = sum(line.startswith("vdpbf16ps") for line in loop)
        assert _loads(loop) * 16 == products * (2 + 8), loop
        assert not any(re.search(r"mm\d.*%rsp|%rsp.*mm\d", line) for line in loop), loop


@pytest.mark.parametrize(
    "epilogue",
    # The sum of a row may be a function of its own.
    [
        "(?:softmax_fused<float>|sum_exponentials<true, float>)",
        "elementwise_rows<true, false, float",
        "sigmoid_rows_of_few_positives<true, float>",
    ],
)
def test_an_epilogue_asks_for_the_next_row(epilogue):
    """GCC takes a function that only prefetches for one without effect, and drops calls of it."""
    if fastsim.backends()["cpu"] is not None or shutil.which("objdump") is None:
        pytest.skip("needs the C++ extension and objdump")
    name = re.compile(rf"\w+ <(?:void )?fastsim::(\w+)::\(anonymous namespace\)::{epilogue}")
    code = defaultdict(str)  # of an instruction set: lambdas have functions of their own
    for head, lines in _functions("objdump", LIBRARY):
        if found := name.match(head):
            code[found[1]] += lines
    assert code
    assert all(re.search(r"\b(prefetch\w*|prfm)\s", lines) for lines in code.values())

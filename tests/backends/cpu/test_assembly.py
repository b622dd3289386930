"""The machine code of the register tile: what the compiler made of the loop that does the work."""

import re
import shutil
import subprocess

import pytest

import fastsim
from fastsim.backends.cpu.backend import LIBRARY

pytestmark = pytest.mark.skipif(
    fastsim.backends()["cpu"] is not None or shutil.which("objdump") is None,
    reason="needs the C++ extension and objdump",
)
SETS = {"avx512": ("zmm", 24), "avx2": ("ymm", 12)}  # vector registers, sums of a tile of 6 rows


def _functions():
    """(demangled name, [(address, instruction)]) of every function of the library."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", LIBRARY]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in re.split(r"\n\n", text):
        head, *lines = part.strip().split("\n")
        name = re.match(r"[0-9a-f]+ <(.*)>:", head)
        if name:
            rows = (re.match(r"\s*([0-9a-f]+):\s*(.*)", line) for line in lines)
            yield name[1], [(int(row[1], 16), row[2]) for row in rows if row]


def _innermost_loops(code):
    """The instructions of each loop that holds no other."""
    spans = []
    for address, instruction in code:
        jump = re.match(r"j\w+\s+([0-9a-f]+)", instruction)
        if jump and int(jump[1], 16) <= address:
            spans.append((int(jump[1], 16), address))
    for first, last in spans:
        inner = any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
        if not inner:
            yield [instruction for address, instruction in code if first <= address <= last]


@pytest.fixture(scope="module")
def tiles():
    """The loops over the depth of the full float32 tiles, by instruction set."""
    found = {name: [] for name in SETS}
    for name, code in _functions():
        tile = re.search(r"fastsim::(\w+)::.*\btile<float, 6\b", name)
        if tile and tile[1] in found:
            loops = [loop for loop in _innermost_loops(code) if "vfmadd" in " ".join(loop)]
            found[tile[1]] += loops
    if not any(found.values()):
        pytest.skip("the library is of another architecture")
    return found


@pytest.mark.parametrize("name", SETS)
def test_the_hot_loop_multiplies_and_loads_alone(tiles, name):
    """No addition, no broadcast from a register and no spill: they take the multiplier's ports."""
    register, sums = SETS[name]
    assert tiles[name]
    for loop in tiles[name]:
        products = [line for line in loop if line.startswith("vfmadd") and register in line]
        assert len(products) % sums == 0
        assert products, loop
        for line in loop:
            assert not re.match(r"v(add|sub|mul)p", line), line
            assert not re.match(r"vbroadcasts\w+\s+%", line), line
            assert not re.match(r"v\S+\s.*\(%rsp", line), line

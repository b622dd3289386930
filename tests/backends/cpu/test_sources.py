"""The C++ sources of the CPU kernels."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CPU = Path(__file__).parents[3] / "csrc/cpu"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
HEADERS = sorted(h.name for h in CPU.glob("*.h") if "FASTSIM_ISA" in h.read_text())

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_needs_no_other_before_it(header, tmp_path):
    """Included alone and twice, it compiles."""
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "cpu/{header}"\n' * 2)
    command = [COMPILER, "-std=c++20", "-fsyntax-only", f"-I{CPU.parent}", source]
    subprocess.run(command, check=True)

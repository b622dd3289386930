"""No loss holds an N x N matrix: the rise of the peak in a fresh process."""

import pytest

import fastsim
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.memory import rise


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.products[1]])
def test_peak_memory(name, usable):
    usable("cpu")
    # One 8192 x 8192 float32 matrix is 256 MB; inputs and gradients are 12 MB each. Of a teacher as
    # of any scores: unit rows of both sides, packed columns (12 MB each) and a panel (16 MB).
    teacher = 60 if CASES[name].function is fastsim.distill else 0
    assert rise(name, "fastsim cpu", 8192, 384) < 100 + teacher

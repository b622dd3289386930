"""No loss holds an N x N matrix: the rise of the peak in a fresh process."""

import pytest

from fastsim.benchmark.cases import CASES
from fastsim.benchmark.memory import rise

# Megabytes. Second scores of a teacher or guide: unit rows of both sides and packed columns, 4
# each, and a panel of 16.
SECOND = 28
FURTHER = dict.fromkeys(("distill", "distill margins", "info_nce guided"), SECOND)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.products[1]])
def test_peak_memory(name, usable):
    usable("cpu")
    # One 8192 x 8192 float32 matrix is 256 MB; inputs and gradients are 4 MB each.
    assert rise(name, "fastsim cpu", 8192, 128) < 90 + FURTHER.get(name, 0)

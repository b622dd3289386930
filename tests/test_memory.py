"""No loss holds an N x N matrix: the peak's rise in a fresh process, bench/memory.py's measure."""

import pytest

from bench.memory import LOSSES, rise


@pytest.mark.parametrize("name", LOSSES)
def test_peak_memory(name, usable):
    usable("cpu")
    # One 8192 x 8192 float32 matrix is 256 MB; inputs and gradients are 12 MB each.
    assert rise(name, 8192, 384, "cpu") < 100

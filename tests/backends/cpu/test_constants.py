"""Numbers that stand in Python and in C++, where neither can read the other's."""

import re
from pathlib import Path

import pytest

from fastsim.backends.cpu import both_ways, sizes, workspace

SOURCES = Path(__file__).parents[3] / "csrc/cpu"


@pytest.mark.parametrize(
    ("value", "file", "name"),
    [
        (workspace.CACHED >> 20, "panel.h", "kCached"),
        (4 * sizes.BAND >> 20, "panel.h", "kMostUnitRows"),
        (both_ways.LARGEST, "softmax_sums.h", "kLargest"),
    ],
)
def test_a_number_is_the_same_in_both(value, file, name):
    found = re.findall(rf"\b{name} = ([\d.]+)(?: << 20)?;", (SOURCES / file).read_text())
    assert [float(number) for number in found] == [value]

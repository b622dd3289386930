"""Which rows are worked on at a time."""

import pytest
import torch

from fastsim.backends.bands import FILLING, bands


@pytest.mark.parametrize("shape", [(23, 6), (23, 2, 3), (1, 6), (0, 6), (4, 0)], ids=str)
@pytest.mark.parametrize("numbers", [1, 6, 35, 36, 1 << 20])
def test_every_row_once_in_order(shape, numbers):
    x = torch.randn(shape)
    found = bands(x, numbers)
    assert [row for rows in found for row in range(len(x))[rows]] == [*range(len(x))]
    width = x[:1].numel()
    assert all(rows.stop - rows.start == 1 or x[rows].numel() <= numbers for rows in found)
    # No band could take in the next one's first row.
    assert all(x[rows].numel() + width > numbers for rows in found[:-1])


def test_a_gpu_is_filled():
    x = torch.empty(2 * FILLING // 4 + 1, 4, device="meta")
    assert len(bands(x, 1 << 16)) == 3
    assert len(bands(x, 2 * FILLING)) == 2

"""Selections of 16-bit rows that lie close together: what they find is the closest in float64."""

import pytest
import torch

import fastsim

WIDTH = 63
# Of a cosine: its products are exact and their sizes add up to 1 at most (Cauchy-Schwarz), so each
# addition, and the rests of two norms, round by 2^-24 at most.
ROUNDING = (WIDTH + 4) * 2.0**-24


def near(rows, dtype):
    """Rows around one point, whose cosines differ by less than their dtype rounds."""
    return (0.05 * torch.randn(rows, WIDTH) + torch.randn(WIDTH)).to(dtype)


def cosines(x, y):
    x, y = (side.double() / side.double().norm(dim=1, keepdim=True) for side in (x, y))
    return x @ y.T


def check_hardest(x, groups, positives, negatives):
    """The farthest of each row's group and the nearest of the others, but for rounding."""
    for i, row in enumerate(cosines(x, x)):
        own = [row[j] for j in range(len(x)) if j != i and groups[j] == groups[i]]
        others = [row[j] for j in range(len(x)) if groups[j] != groups[i]]
        assert row[positives[i]] <= min(own) + ROUNDING
        assert row[negatives[i]] >= max(others) - ROUNDING


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
def test_closest_negatives_of_near_rows(mining, dtype):
    x, y = near(33, dtype), near(49, dtype)
    found, index = fastsim.closest_negative(x, y, mining=mining, backend="triton")
    scores = cosines(x, y)
    for i, row in enumerate(scores):
        others = [row[j] for j in range(49) if j != i]
        if mining == "semi-hard":
            inside = [s for s in others if s <= row[i] - ROUNDING]
            outside = [s for s in others if s <= row[i] + ROUNDING]
            if not outside:
                assert index[i] == -1
                continue
            assert max(inside, default=-1) - ROUNDING <= row[index[i]] <= max(outside) + ROUNDING
        else:
            assert row[index[i]] >= max(others) - ROUNDING
        assert abs(found[i] - row[index[i]]) <= ROUNDING


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hardest_pairs_of_near_rows(dtype):
    x, groups = near(33, dtype), torch.arange(33) % 8
    found = fastsim.hardest_pairs(x, groups, distance="cosine", backend="triton")
    check_hardest(x, groups, found.positive_index, found.negative_index)

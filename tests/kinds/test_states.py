"""What parts of a state keep when they are merged, and what is known of rows without negatives."""

import math

import pytest
import torch

import fastsim
from fastsim.kinds.distillation import TeacherSums
from fastsim.kinds.kind import Exponentials, Total
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss

TILE = TileLoss("softmax", Pairs(), scale=3.0, positive_scale=5.0)
# Part -> (the number of maxima before its sums, its scale).
PARTS = {
    Total(): (0, 0.0),
    Exponentials(): (1, TILE.scale),
    Exponentials(scale="positive_scale"): (1, TILE.positive_scale),
    TeacherSums(): (1, TILE.positive_scale),
}


def states(part, tops, sums):
    """States of one row, with these maxima and sums, from which each sum of a part differs."""
    maxima = PARTS[part][0]
    for top, total in zip(tops, sums, strict=True):
        kept = [total * (2.0**place) for place in range(part.size - maxima)]
        yield [torch.tensor([value]) for value in [top] * maxima + kept]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_what_a_sum_has_lost_is_known(part):
    """Exactly: where the maxima are equal no factor is rounded."""
    small = 3 * 2.0**-26
    one, other = states(part, (0.5, 0.5), (1.0, small))
    both = part.merge(TILE, one, other)
    maxima, _ = PARTS[part]
    lost = part.lost(TILE, one, other, both)
    for place in range(part.size - maxima):
        total, (error, factor) = both[maxima + place].double(), lost[maxima + place]
        assert total + error == (1 + small) * 2.0**place
        assert error != 0
        assert factor == 1


@pytest.mark.parametrize("order", [(0.25, 0.875), (0.875, 0.25)], ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_sums_are_relative_to_the_larger_maximum(part, order):
    maxima, scale = PARTS[part]
    one, other = states(part, order, (3.0, 7.0))
    both = part.merge(TILE, one, other)
    lost = part.lost(TILE, one, other, both)
    factors = [math.exp(scale * (top - 0.875)) for top in order]
    for place in range(part.size - maxima):
        wanted = 2.0**place * (3 * factors[0] + 7 * factors[1])
        torch.testing.assert_close(both[maxima + place], torch.tensor([wanted]))
        factor = torch.as_tensor(lost[maxima + place][1]).view(-1)
        torch.testing.assert_close(factor, torch.tensor([factors[0]]))
    assert both[:maxima] == [0.875] * maxima


@pytest.mark.parametrize("part", [part for part, (maxima, _) in PARTS.items() if maxima], ids=str)
def test_nothing_is_lost_of_sums_that_count_for_nothing(part):
    """Those relative to a maximum so far below the other that the factor is 0."""
    one, other = states(part, (-1000.0, 1000.0), (0.7, 0.3))
    both = part.merge(TILE, one, other)
    assert both == other
    assert all(error == factor == 0 for error, factor in part.lost(TILE, one, other, both)[1:])


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("backend", fastsim.backends())
def test_negatives_that_are_all_infinite_reach_the_loss(backend, count, in_passes, usable):
    """A row of them is not a row without any: the logarithm of their sum is that of 0."""
    usable(backend)
    x, y = torch.tensor([[1.0, 0.5]]), torch.tensor([[1.0, 1.0], [-torch.inf, 1.0]])
    y = y[[0, *[1] * count]]
    options = {"similarity": "dot", "reduction": "none", "backend": backend}
    assert fastsim.decoupled_contrastive(x, y, **options) == -torch.inf
    assert fastsim.decoupled_contrastive(x, y[:1], **options) == 0


@pytest.mark.parametrize("backend", fastsim.backends())
def test_a_positive_without_negatives_is_not_pulled(backend, in_passes, usable):
    usable(backend)
    x, y = (torch.randn(1, 6, requires_grad=True) for _ in "xy")
    loss = fastsim.decoupled_contrastive(x, y, backend=backend)
    assert loss == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, y)))

"""Gradients that a forward pass has found: times that of the loss, whenever they are asked for."""

import pytest
import torch

import fastsim
from tests.seeds import fresh

ROWS, WIDTH = 150, 20  # more than one call of a backend makes whole


def sides(seed):
    random = fresh(seed)
    return [torch.randn(ROWS, WIDTH, generator=random, requires_grad=True) for _ in range(2)]


def losses(x, y):
    """Each with gradients found by the forward pass, of panels and of a small batch."""
    with fastsim.panel_size(0.01):
        yield fastsim.info_nce(x, y)
        yield fastsim.siglip(x, y)
    yield fastsim.info_nce(x, y)


def test_a_graph_that_is_kept_gives_them_again(usable):
    usable("cpu")
    x, y = sides(0)
    for loss in losses(x, y):
        first = torch.autograd.grad(loss, (x, y), retain_graph=True)
        wanted = [grad.clone() for grad in first]
        for grad in first:
            grad.zero_()  # they are the caller's
        again = torch.autograd.grad(loss, (x, y), retain_graph=True)
        assert all(map(torch.equal, again, wanted))
        last = torch.autograd.grad(loss, (x, y))
        assert all(map(torch.equal, last, wanted))


@pytest.mark.parametrize("factor", [1.0, 3.0, 0.0])
def test_they_are_times_that_of_the_loss(factor, usable):
    usable("cpu")
    x, y = sides(1)
    plain = [torch.autograd.grad(loss, (x, y)) for loss in losses(x, y)]
    times = [torch.autograd.grad(factor * loss, (x, y)) for loss in losses(x, y)]
    for ones, found in zip(plain, times, strict=True):
        for one, other in zip(ones, found, strict=True):
            torch.testing.assert_close(other, factor * one)


def test_they_add_up_in_a_leaf(usable):
    usable("cpu")
    x, y = sides(2)
    loss, wanted = fastsim.siglip(x, y), torch.autograd.grad(fastsim.siglip(x, y), x)[0]
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * wanted)

"""A sum over prefixes of a small batch in one call: against float64 oracles, width by width."""

import pytest
import torch

import fastsim
from fastsim import losses
from tests.engine.test_sweep import (
    DTYPES,
    SERVED,
    WEIGHTS,
    WIDTHS,
    compare,
    is_the_loss_of_the_widest,
)

NOT_SWEPT = ("nt_xent", "circle", "multi_similarity")  # which a sweep does not serve
NOT_SERVED = ("info_nce-above", "info_nce-smooth", "info_nce-guide", "full_triplet")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SERVED + NOT_SWEPT)
def test_equals_the_oracle(name, dtype, usable):
    usable("cpu")
    compare(name, "cpu", dtype, (41, 53, WIDTHS[0]))


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_is_not_served_is_the_loss_of_the_widest(name, usable):
    usable("cpu")
    is_the_loss_of_the_widest(name, "cpu")


def test_what_is_learnt_and_derived_again(usable):
    usable("cpu")
    sides = [torch.randn(23, WIDTHS[0], dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def derivatives(backend):
        learnt = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (3.0, -0.7)]
        loss = losses.SigLIP(scale=learnt[0], bias=learnt[1], backend=backend)
        inputs = [*sides, *learnt]
        value = losses.Matryoshka(loss, WIDTHS, WEIGHTS)(*sides)
        grads = torch.autograd.grad(value, inputs, create_graph=True)
        return [value, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)]

    for got, wanted in zip(derivatives("cpu"), derivatives("eager"), strict=True):
        torch.testing.assert_close(got, wanted)


def test_each_sum_is_kept_for_itself(usable):
    """A loss is kept by signature: of the full width, and of each list of widths and factors."""
    usable("cpu")
    x, y = torch.randn(9, 34), torch.randn(9, 34)
    loss = losses.InfoNCE(backend="cpu")
    sums = [losses.Matryoshka(loss, *given) for given in [[(34, 17)], [(34, 5)], [(34, 5), (2, 1)]]]
    first = [loss(x, y), *(one(x, y) for one in sums)]
    assert len({value.item() for value in first}) == 4
    again = [loss(x, y), *(one(x, y) for one in sums)]
    assert first == again
    for one, value in zip(sums, first[1:], strict=True):
        of_widths = zip(one.widths, one.weights, strict=True)
        wanted = sum(c * fastsim.info_nce(x[:, :w], y[:, :w]) for w, c in of_widths)
        torch.testing.assert_close(value, wanted)


def test_metrics_see_each_width(usable):
    """They look at the scores of one width at a time."""
    usable("cpu")
    x, y = torch.randn(9, 34), torch.randn(9, 34)
    loss = losses.Matryoshka(losses.InfoNCE(backend="cpu"), WIDTHS, WEIGHTS)
    alone = loss(x, y)
    with fastsim.metrics() as seen:
        torch.testing.assert_close(loss(x, y), alone)
    with fastsim.metrics() as wanted:
        for width in WIDTHS:
            fastsim.info_nce(x[:, :width], y[:, :width], backend="cpu")
    assert seen.read() == wanted.read()

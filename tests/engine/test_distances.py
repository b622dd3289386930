"""Distances of triplets where two rows nearly coincide, far from the origin and from each other."""

import pytest
import torch

from fastsim import losses
from fastsim.engine import distances
from tests import oracles
from tests.cases import call
from tests.measure import assert_close, conditioning

CLOSE = 0.25  # the share of |x|^2 + |y|^2 below which a pair is close

# Not the semi-hard one: of a negative and its close copy rounding may choose either.
LOSSES = (losses.batch_all_triplet, losses.batch_hard_triplet)


@pytest.fixture(params=["listed", "not listed"])
def pairs(request, monkeypatch):
    """Close pairs taken one by one, as on a CPU, or all in float64, as where one would wait."""
    if request.param == "not listed":
        monkeypatch.setattr(distances, "_listable", lambda x: False)


@pytest.mark.parametrize("norm", [1.0, 240.0])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_rows_that_nearly_coincide(loss, norm, pairs, monkeypatch):
    """More rows than torch.cdist takes differences of; in bands, each with close pairs."""
    from fastsim.engine import triplets

    monkeypatch.setattr(triplets, "BAND", 400)
    x = torch.nn.functional.normalize(torch.randn(36, 24)) * norm
    x[18:] = x[:18] + norm * 4e-5 * torch.randn(18, 24)
    groups = torch.arange(36) % 9  # of a row's own group is its close one, and two far ones
    groups[27:] = torch.arange(9).roll(1)  # or its close one is of another
    options = {"margin": 3 * norm}  # no hinge is near its kink
    oracle = getattr(oracles, loss.__name__)

    def mean(x, groups, **options):
        found = oracle(x, groups, **options)
        return found.mean() if found.dim() else found

    def results(tensors):
        value, grads = call(mean, tensors, [groups], options)
        return [value, *grads]

    truth = results([x.double()])
    dense = call(loss, [x], [groups], options | {"backend": "eager"})
    got = call(loss, [x], [groups], options | {"backend": "cpu"})
    eps = torch.finfo(torch.float32).eps
    moved = [eps * move for move in conditioning(results, [x.double()])]
    # Two distances are set against each other, each as exact as the squares of the norms of its
    # rows allow: eps (|x|^2 + |y|^2) / 2 d, where d^2 is at least CLOSE times the sum.
    moved[0] = max(moved[0], 2 * eps * (2 * norm**2 / CLOSE) ** 0.5 / 2)
    assert_close("value", got[0], truth[0], dense[0], torch.float32, moved=moved[0])
    # The direction between two close rows is exact, whatever their distance to the origin.
    assert_close("gradient", got[1][0], truth[1], dense[1][0], torch.float32, moved=moved[1])


def test_rows_that_coincide_do_not_pull_each_other(pairs):
    """Within a group and across two: a distance of 0 has no direction."""
    x = torch.randn(12, 5)
    x[6:9], x[9] = x[:3].clone(), x[3].clone()
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 0, 0, 2, 2, 1, 0])
    options = {"margin": 99.0}  # all triplets take part
    truth, (wanted,) = call(oracles.batch_all_triplet, [x.double()], [groups], options)
    dense = call(losses.batch_all_triplet, [x], [groups], options | {"backend": "eager"})
    got = call(losses.batch_all_triplet, [x], [groups], options | {"backend": "torch"})
    assert_close("value", got[0], truth, dense[0], torch.float32)
    # A mean over triplets, each of which has at most two unit directions for a row.
    assert_close("gradient", got[1][0], wanted, dense[1][0], torch.float32, size=2.0)


def test_pairs_that_are_close_are_not_those_that_coincide():
    """Of distances by products too the error is small: the squares' is half a rounding for each of
    their products, relative to |x|^2 + |y|^2, and the distance's 1 / (2 CLOSE) times that.
    """
    base = torch.randn(40, 16)
    x = torch.cat([base, base + 0.15 * torch.randn(40, 16)])
    centred = x - x.mean(0)
    found = distances.distances_by_products(x, centred, slice(0, 80), lambda rows: rows @ centred.T)
    truth = torch.linalg.vector_norm(x.double()[:, None] - x.double(), dim=2)
    apart = truth > 0
    errors = ((found.values - truth).abs() / truth)[apart]
    assert errors.max() <= 16 * torch.finfo(torch.float32).eps / 2 / (2 * CLOSE)


def test_rows_a_subnormal_number_apart():
    """1 / d overflows there, the direction between the rows does not."""
    x = torch.tensor([[0.0], [torch.finfo(torch.float32).tiny / 64], [1.0], [3.0]])
    groups = torch.tensor([0, 0, 1, 1])
    _, (truth,) = call(oracles.batch_all_triplet, [x.double()], [groups], {})
    _, (grad,) = call(losses.batch_all_triplet, [x], [groups], {"backend": "torch"})
    # Sums of a few unit pulls and distances up to 3, each rounded.
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(grad.double(), truth, rtol=0, atol=8 * eps)

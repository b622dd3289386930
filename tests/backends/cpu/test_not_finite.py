"""Rows with Inf, -Inf or NaN: a loss is finite where the dense formula is, and nowhere else.

Dot products with a row that holds Inf are Inf or -Inf; its cosines are NaN.
"""

import math

import pytest
import torch

import fastsim
from fastsim.backends.cpu import amx, sizes
from tests.measure import assert_close

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WAYS = [None, "in_passes", "small_panels"]
INFINITE = [math.inf, -math.inf]


@pytest.fixture(params=WAYS)
def any_way(request, usable):
    """In one call, in panels of all columns, in panels of a few."""
    usable("cpu")
    if request.param is not None:
        request.getfixturevalue(request.param)


def results(loss, arguments, options, dtype, backend):
    """[losses of the rows, their sum (1,), gradients of the sum] from arguments of this dtype."""
    leaves = [a.to(dtype, copy=True).requires_grad_() for a in arguments if a.is_floating_point()]
    rest = [a for a in arguments if not a.is_floating_point()]
    rows = loss(*leaves, *rest, **options, reduction="none", backend=backend)
    total = loss(*leaves, *rest, **options, reduction="sum", backend=backend)
    return [rows.detach(), total.detach()[None], *torch.autograd.grad(total, leaves)]


def assert_alike(loss, *arguments, **options):
    """Finite where the dense formula is in float64, and there as close to it; returns its losses.

    A float16 number is the sum of two bfloat16 parts for a matrix unit. Those of Inf are Inf and
    NaN, so a score of Inf is NaN there, and the loss of its row too.
    """
    dtype = arguments[0].dtype
    mine = results(loss, arguments, options, dtype, "cpu")
    dense = results(loss, arguments, options, dtype, "eager")
    truth = results(loss, arguments, options, torch.float64, "eager")
    for name, got, wanted, plain in zip(("rows", "sum"), mine, truth, dense, strict=False):
        finite, found = wanted.isfinite(), got.isfinite()
        assert not (found & ~finite).any(), name
        if amx.parts(dtype) != 2:
            assert (found == finite).all(), name
        if found.any():
            assert_close(name, got[found], wanted[found], plain[found], got.dtype)
    for got, wanted in zip(mine[2:], truth[2:], strict=True):
        assert wanted.isfinite().all() or not got.isfinite().all()
    return truth[0]


@pytest.mark.parametrize("value", INFINITE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", ["some", "one", "own"])
@pytest.mark.parametrize("loss", [fastsim.nt_xent, fastsim.multi_similarity], ids=["nt", "ms"])
def test_of_groups(loss, groups, dtype, value, any_way):
    """Scores of Inf and -Inf of positives and negatives; rows without positives or negatives."""
    x = torch.randn(30, 6).to(dtype)
    x[1, 2] = value
    labels = {
        "some": torch.arange(30) % 4 * (torch.arange(30) < 26) - torch.arange(30).sub(25).relu(),
        "one": torch.zeros(30).long(),
        "own": torch.arange(30),
    }[groups]
    multi = loss is fastsim.multi_similarity
    steepness = {"alpha": 0.5, "beta": 0.7} if multi else {"temperature": 3.0}
    wanted = assert_alike(loss, x, labels, similarity="dot", **steepness)
    if groups == "some":  # both kinds are there
        assert 0 < wanted.isfinite().sum() < 30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negatives_of_minus_infinity_alone(dtype, any_way):
    """The loss of a positive pair is then 0: the sum of the exponentials of the negatives is 0."""
    x = torch.ones(4, 1).to(dtype)
    x[2:] = -math.inf
    options = {"similarity": "dot", "temperature": 1.0, "own_first": True}

    def loss(rows, columns, groups, **given):
        return fastsim.nt_xent(rows, groups[:2], columns, groups, **options, **given)

    wanted = assert_alike(loss, x[:2], x, torch.tensor([0, 0, 1, 1]))
    assert wanted.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoupled_negatives_of_minus_infinity(dtype, any_way):
    """The loss is 0 only for a row that has no negatives."""
    x, y = torch.ones(3, 1).to(dtype), torch.ones(140, 1).to(dtype)
    y[1:] = -math.inf
    positives = torch.tensor([0, 0, 5])
    options = {"similarity": "dot", "temperature": 1.0}
    wanted = assert_alike(fastsim.decoupled_contrastive, x, y, positives, **options)
    assert not wanted.isfinite().any()
    y[77] = 2.0
    wanted = assert_alike(fastsim.decoupled_contrastive, x, y, positives, **options)
    assert wanted.isfinite().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
@pytest.mark.parametrize("large", [False, True])
def test_a_triplet_without_a_negative(large, mining, dtype, any_way, monkeypatch):
    if large:
        monkeypatch.setattr(sizes, "CHEAP", -1)
    for value in (math.inf, math.nan):
        for rows, exclude in ((1, None), (5, (torch.zeros(5).long(),) * 2)):
            x, y = torch.randn(2, rows, 7).to(dtype)
            x[0, 3] = value
            wanted = assert_alike(fastsim.full_triplet, x, y, mining=mining, exclude=exclude)
            assert not wanted[0].isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_score_is_not_above_the_positive(dtype, any_way):
    """A score of Inf is not left out by `exclude_above`, so that it reaches the loss."""
    x, y = torch.rand(6, 5).to(dtype), torch.rand(90, 5).to(dtype)
    y[80, 1] = math.inf
    options = {"similarity": "dot", "temperature": 2.0, "exclude_above": 0.1}
    wanted = assert_alike(fastsim.info_nce, x, y, **options)
    assert not wanted.isfinite().any()

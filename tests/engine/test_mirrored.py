"""Rows against themselves: the scores above the diagonal stand for those below it."""

import pytest
import torch

import fastsim
from fastsim.backends.cpu import mirrored, sizes
from tests.cases import CASES, inputs
from tests.losses.test_losses import compare, names
from tests.seeds import fresh
from tests.threads import assert_same_bits

SHAPE = (130, 130, 18)  # two whole blocks on the diagonal and the rest of a third


def is_served(case):
    """Whether the loss goes this way: one set of rows, whose states are their own."""
    tensors, _, _ = inputs(case, (3, 3, 4), torch.float32, seed=0)
    kinds = {"sup_con", "nt_xent", "multi_similarity", "circle"}
    return case.tile and len(tensors) == 1 and case.loss.__name__ in kinds


ALONE = [case for case in CASES if is_served(case)]
LONGER = next(case for case in ALONE if case.loss is fastsim.nt_xent)  # with two forward passes
BOTH = {
    "info_nce": lambda x, **o: fastsim.info_nce(x, x, **o),
    # Of dot products the diagonal has a gradient too.
    "info_nce of dot products": lambda x, **o: fastsim.info_nce(
        x, x, similarity="dot", temperature=8.0, **o
    ),
    "siglip": lambda x, **o: fastsim.siglip(x, x, **o),
    "siglip of a matrix": lambda x, **o: fastsim.siglip(x, x, _targets(len(x)), **o),
    "matrix_cross_entropy": lambda x, **o: fastsim.matrix_cross_entropy(
        x, x, _targets(len(x)), temperature=0.2, **o
    ),
    "info_nce with margin": lambda x, **o: fastsim.info_nce(
        x, x, _partners(len(x)), margin=0.2, **o
    ),
    "info_nce with exclude": lambda x, **o: fastsim.info_nce(
        x, x, _partners(len(x)), exclude=(torch.arange(len(x)) % 7, torch.arange(len(x)) % 11), **o
    ),
    "decoupled_contrastive": lambda x, **o: fastsim.decoupled_contrastive(x, x, **o),
    "debiased_contrastive": lambda x, **o: fastsim.debiased_contrastive(x, x, beta=0.5, **o),
}


def _targets(rows):
    """A target matrix that is not symmetric."""
    return torch.rand(rows, rows, generator=fresh(rows)) * 2 - 1


def _partners(rows):
    """Of each row another one, so that a pair and the same turned round differ."""
    return torch.arange(rows).roll(5)


@pytest.fixture
def calls(monkeypatch, in_passes, usable):
    """How often this way is taken, where any number of rows is enough and blocks are small."""
    usable("cpu")
    taken = []
    monkeypatch.setattr(mirrored, "FEWEST", 1)
    monkeypatch.setattr(mirrored, "NARROWEST", dict.fromkeys(range(4), 1))
    monkeypatch.setattr(mirrored, "SIDE", 64)
    made = mirrored.Mirrored.__init__

    def noted(self, *arguments, **options):
        taken.append(arguments)
        made(self, *arguments, **options)

    monkeypatch.setattr(mirrored.Mirrored, "__init__", noted)
    return taken


@pytest.mark.parametrize(
    ("case", "wide"),
    [
        *((case, 64) for case in ALONE),
        *((case, w) for case in (ALONE[0], LONGER) for w in (128, 256)),
    ],
    ids=names,
)
def test_equals_the_oracle(case, wide, calls, monkeypatch):
    """In blocks of part of a row and of all of it, of which none, some or all scores are kept."""
    monkeypatch.setattr(sizes, "PANEL", 64 * wide)
    monkeypatch.setattr(sizes, "KEPT", {64: 0, 128: 64 * 70, 256: 130 * 130}[wide])
    compare(case, "cpu", torch.float32, SHAPE, seed=wide)
    assert calls


@pytest.mark.parametrize("case", ALONE, ids=names)
def test_one_call_equals_the_oracle(case, usable):
    """It mirrors the scores too, with all of them in memory."""
    usable("cpu")
    compare(case, "cpu", torch.float32, (230, 230, 18), seed=7)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", BOTH)
def test_one_tensor_on_both_sides(name, reduction, calls):
    assert_same(BOTH[name], reduction)
    assert calls


@pytest.mark.parametrize("name", BOTH)
def test_one_tensor_on_both_sides_in_one_call(name, usable):
    usable("cpu")
    assert_same(BOTH[name], "mean")


@pytest.mark.parametrize("way", ["one call", "passes"])
def test_the_gradient_of_the_temperature(way, usable, request):
    usable("cpu")
    if way == "passes":
        request.getfixturevalue("calls")
    x, found = torch.randn(130, 18, dtype=torch.float64, generator=fresh()), []
    for backend in ("cpu", "eager"):
        temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = fastsim.info_nce(x, x, temperature=temperature, backend=backend)
        found.append(torch.autograd.grad(loss, temperature)[0])
    assert_close(*found)


def test_pairs_left_out_by_id_with_hardness(calls):
    """Two operators read each panel, and the first would hide what the second has to turn round."""

    def loss_of(x, **options):
        ids = torch.arange(len(x)) % 7, torch.arange(len(x)) % 11
        return fastsim.debiased_contrastive(x, x, beta=0.5, exclude=ids, **options)

    assert_same(loss_of, "mean")
    assert not calls


def assert_same(loss_of, reduction):
    """In double precision, where the dense formula has the same terms in another order."""
    x = torch.randn(130, 18, dtype=torch.float64, generator=fresh(), requires_grad=True)
    weights = torch.rand(130, dtype=torch.float64, generator=fresh())
    found = []
    for backend in ("cpu", "eager"):
        loss = loss_of(x, backend=backend, reduction=reduction)
        total = (loss * weights).sum() if reduction == "none" else loss
        found.append((total.detach(), *torch.autograd.grad(total, x)))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected)


def assert_close(got, expected):
    # Terms of a sum of 130 that may cancel: of the size of the largest result, times the scale.
    size = max(1.0, expected.abs().max().item())
    eps = torch.finfo(torch.float64).eps
    torch.testing.assert_close(got, expected, rtol=0, atol=20 * 130 * eps * size)


@pytest.mark.parametrize("case", ALONE[:1], ids=names)
def test_without_gradients(case, calls):
    """The same bits as with them."""
    (x,), others, options = inputs(case, SHAPE, torch.float32, seed=5)
    losses = [case.loss(t, *others, **options, backend="cpu") for t in (x.detach(), x)]
    assert len(calls) == 2
    assert torch.equal(*losses)


def test_where_scores_are_counted_all_are_computed(calls):
    """A score that stands for two pairs is not counted for each of their rows."""
    x, groups, found = torch.randn(130, 18), torch.arange(130) // 3, []
    for backend in ("cpu", "torch"):
        with fastsim.metrics() as seen:
            fastsim.sup_con(x, groups, backend=backend)
        found.append(seen.read())
    assert not calls
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_the_hardest_pairs_are_those_of_all_scores(distance, calls, monkeypatch):
    """Also among equal rows, of which the first counts."""
    monkeypatch.setattr(sizes, "CHEAP", 0)
    monkeypatch.setattr(sizes, "PANEL", 64 * 64)
    generator = fresh()
    x = torch.randn(60, 18, generator=generator).repeat(5, 1)
    groups, found, taken = torch.randint(0, 40, (300,), generator=generator), [], []
    monkeypatch.setattr(mirrored, "bands", _noted(mirrored.bands, taken))
    for fewest in (1, 301):
        monkeypatch.setattr(mirrored, "FEWEST", fewest)
        found.append(fastsim.hardest_pairs(x, groups, distance=distance, backend="cpu"))
        assert len(taken) == 1
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)


def _noted(function, taken):
    """`function`, which adds its arguments to `taken`."""

    def call(*arguments):
        taken.append(arguments)
        return function(*arguments)

    return call


def test_bits_do_not_depend_on_threads(calls):
    generator = fresh()
    x = torch.randn(1100, 24, generator=generator, requires_grad=True)
    groups = torch.randint(0, 300, (1100,), generator=generator)

    def results():
        loss = fastsim.multi_similarity(x, groups, backend="cpu")
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    assert_same_bits(results, (1, 2, 3))
    assert len(calls) == 3

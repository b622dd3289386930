"""Rows, selection and CoSENT of the Triton backend, under the interpreter."""

import pytest
import torch

import fastsim
from fastsim import losses
from fastsim.integrations.products import cross_entropy
from tests.backends.triton.interpreted import oracle

HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.bfloat16], ids=str)
def test_unit_rows(dtype):
    # A step of two columns and a backward that has to pick them up again.
    x = torch.randn(19, 2 * 45).to(dtype)[:, ::2]
    x[3] = 0
    x[5] *= 1e4 if dtype == HALF else 1e30
    results = []
    for backend, wide in (("triton", dtype), ("eager", torch.float64)):
        rows = x.detach().to(wide).requires_grad_()
        out = fastsim.paired_cosine_similarity(rows, rows.flip(0), backend=backend)
        out.sum().backward()
        results.append((out.detach(), rows.grad))
    for mine, truth in zip(*results, strict=True):
        eps = torch.finfo(mine.dtype).eps
        assert (mine.double() - truth).abs().max() <= 4 * eps * truth.abs().max()
    assert results[0][1][3].eq(0).all()


def test_cosines_of_pairs_in_columns():
    """Rows of which neighbours in memory are those of a column."""
    x, y = torch.randn(4, 3).t(), torch.randn(4, 3).t()
    grads = []
    for backend, dtype in (("triton", SINGLE), ("eager", torch.float64)):
        sides = [side.detach().to(dtype).requires_grad_() for side in (x, y)]
        assert not sides[0].is_contiguous()
        fastsim.paired_cosine_similarity(*sides, backend=backend).sum().backward()
        grads.append(torch.stack([side.grad for side in sides]))
    mine, truth = grads
    assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(SINGLE).eps


@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_closest_negative(mining, dtype):
    x, y = torch.randn(21, 24).to(dtype), torch.randn(45, 24).to(dtype)
    y[30] = y[7]  # the smaller column among equals
    values, indices = losses.closest_negative(x, y, mining=mining, backend="triton")
    s = oracle.cosines(x.double(), y.double())
    rounding = 4 * torch.finfo(dtype).eps
    for i, (value, j) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
        ceiling = s[i, i] if mining == "semi-hard" else 2.0
        others = [a for k, a in enumerate(s[i].tolist()) if k != i]
        # Rounding may move a score across the positive's.
        sure = [a for a in others if a <= ceiling - rounding]
        if sure:
            assert j != i
            assert abs(value - s[i, j]) <= rounding
            assert max(sure) - rounding <= s[i, j] <= ceiling + rounding
        if i != 7:
            assert j != 30


def test_a_copy_of_the_positive_is_semi_hard():
    x = torch.randn(20, 40, dtype=HALF)
    y = torch.cat([x, x])
    values, indices = losses.closest_negative(x, y, mining="semi-hard", backend="triton")
    assert indices.tolist() == list(range(20, 40))
    assert (values - 1).abs().max() < 1e-6


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_hardest_pairs(distance, dtype):
    x, y = torch.randn(21, 24).to(dtype), torch.randn(70, 24).to(dtype)
    groups, others = torch.randint(0, 4, (21,)), torch.randint(0, 4, (70,))
    groups[3] = 9
    for references in ((), (y, others)):
        got = fastsim.hardest_pairs(x, groups, *references, distance=distance, backend="triton")
        wide = [t.double() if t.is_floating_point() else t for t in references]
        exact = fastsim.hardest_pairs(x.double(), groups, *wide, distance=distance, backend="eager")
        # The scores that choose are rounded, the distances of what was chosen are not.
        rounding = 16 * torch.finfo(dtype if distance == "cosine" else SINGLE).eps
        for mine, truth in zip(got[:2], exact[:2], strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=0, atol=rounding)
        assert torch.equal(got.positive_index == -1, exact.positive_index == -1)
        assert got.positive_index[3] == -1


def test_hardest_pairs_of_equal_rows():
    x = torch.randn(1, 5).repeat(40, 1)
    groups = torch.arange(40) // 2
    got = fastsim.hardest_pairs(x, groups, backend="triton")
    assert torch.equal(got.positive_index, torch.arange(40) ^ 1)
    assert got.negative_index.tolist() == [2, 2] + [0] * 38  # the first among equals


def test_closest_negative_of_one_row():
    x = torch.randn(1, 5)
    values, indices = losses.closest_negative(x, x.clone(), backend="triton")
    assert values.item() == -torch.inf
    assert indices.item() == -1


def test_top_k():
    queries, corpus = torch.randn(7, 24), torch.randn(90, 24)
    corpus[50] = corpus[4]
    values, indices = fastsim.top_k(queries, corpus, 11, backend="triton")
    wanted, places = fastsim.top_k(queries, corpus, 11, backend="eager")
    assert torch.equal(indices, places)
    assert (values - wanted).abs().max() <= 4 * torch.finfo(SINGLE).eps


@pytest.mark.parametrize("scale", [0.5, 20.0, 1000.0])
@pytest.mark.parametrize("kind", ["few", "many", "float", "bool"])
def test_cosent(scale, kind):
    count = 2500 if kind == "many" and scale == 20 else 130
    labels = {
        "few": torch.randint(0, 4, (count,)),
        "many": torch.randint(0, count, (count,)),
        "float": torch.randn(count).round(decimals=1),
        "bool": torch.rand(count) < 0.5,
    }[kind]
    raw = torch.randn(count)
    found = []
    for kind_of in ("triton", "dense", "truth"):
        wide = torch.float64 if kind_of == "truth" else SINGLE
        scores = raw.clone().to(wide).detach().requires_grad_()
        number = torch.tensor(scale, dtype=wide, requires_grad=True)
        if kind_of == "triton":
            loss = losses.cosent(scores, labels, scale=number, backend="triton")
        elif kind_of == "dense":
            loss = losses.cosent_from_scores(scores, labels, scale=number)
        else:
            loss = oracle.cosent(scores, labels, number)
        loss.backward()
        found.append([loss.detach(), scores.grad, number.grad])
    truth = found[-1]
    sizes = [truth[0].abs(), truth[1].abs().max(), (truth[1] * raw).abs().sum() / scale]
    for mine, dense, true, size in zip(*found, sizes, strict=True):
        error, formula = ((t.double() - true).abs().max() for t in (mine, dense))
        # A score gradient is the exponential of a logit less the loss, rounded at the size of the
        # loss.
        rounding = torch.finfo(SINGLE).eps * (1 + truth[0].abs())
        assert error <= 2 * (formula + rounding * size)


def test_cosent_without_pairs():
    for labels in (torch.zeros(9), torch.zeros(1)):
        scores = torch.randn(len(labels), requires_grad=True)
        loss = losses.cosent(scores, labels, backend="triton")
        loss.backward()
        assert loss.item() == 0
        assert scores.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_products_of_rows_as_they_are(name, dtype):
    """Scores that are no cosines, as open_clip's losses have them."""
    peer = "fastsim.integrations.open_clip"
    open_clip = pytest.importorskip(peer, reason="it is not installed", exc_type=ImportError)
    loss = getattr(open_clip, name)()
    x, y = (0.4 * torch.randn(21, 24).to(dtype) for _ in "xy")
    found = []
    for backend in ("triton", "eager"):
        wide = dtype if backend == "triton" else torch.float64
        leaves = [x.to(wide).requires_grad_(), y.to(wide).requires_grad_()]
        leaves.append(torch.tensor(3.0, dtype=torch.float64 if wide == torch.float64 else SINGLE))
        with fastsim.use_backend(backend):
            value = loss(*leaves[:2], leaves[2].requires_grad_(), torch.tensor(-1.0))
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for mine, truth in zip(*found, strict=True):
        eps = torch.finfo(dtype).eps
        assert (mine.double() - truth).abs().max() <= 8 * eps * truth.abs().max()


def test_products_of_rows_that_float16_cannot_hold():
    x, y = ((factor * torch.randn(21, 24)).bfloat16() for factor in (2.0**20, 2.0**-20))
    found = []
    for backend, wide in (("triton", torch.bfloat16), ("eager", torch.float64)):
        leaves = [side.to(wide, copy=True).requires_grad_() for side in (x, y)]
        with fastsim.use_backend(backend):
            value = cross_entropy(*leaves, torch.arange(21), 0.5)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for mine, truth in zip(*found, strict=True):
        eps = torch.finfo(torch.bfloat16).eps
        assert (mine.double() - truth).abs().max() <= 4 * eps * truth.abs().max()

"""The hardest pairs by group: against loops, references, ties, zero distance, any origin."""

import pytest
import torch

import fastsim
from fastsim.backends.base import Backend
from fastsim.backends.cpu.backend import CpuBackend
from tests.measure import assert_close, conditioning

BACKENDS = tuple(fastsim.backends())


def loops(x, groups, y, others, skip, distance):
    """(distances (N, M), which pairs are positives, which are negatives), one after the other."""
    far, own = torch.empty(len(x), len(y), dtype=torch.float64), []
    for i, a in enumerate(x.double()):
        for j, b in enumerate(y.double()):
            if distance == "cosine":
                far[i, j] = 1 - torch.dot(a, b) / (a.norm() * b.norm())
            else:
                far[i, j] = (a - b).norm()
        own.append([groups[i] == label for label in others])
    own = torch.tensor(own)
    itself = torch.eye(*far.shape, dtype=torch.bool) & skip
    return far, own & ~itself, ~own


def of_pairs(distance):
    """A function of rows and as many others: [their distances]."""
    if distance == "euclidean":
        return lambda sides: [(sides[0] - sides[1]).norm(dim=1)]
    return lambda sides: [1 - torch.nn.functional.cosine_similarity(*sides, eps=0)]


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("references", ["none", "others", "own first"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_loops(backend, references, distance, usable, small_panels):
    """The distances of the pairs that are named, and that no other pair is harder."""
    usable(backend)
    x, groups = torch.randn(37, 9), torch.randint(0, 6, (37,))
    groups[0] = 7  # alone, and without a positive anywhere
    y, others = torch.randn(141, 9), torch.randint(0, 6, (141,))
    options = {"distance": distance, "backend": backend}
    if references == "none":
        y, others = x, groups
        got = fastsim.hardest_pairs(x, groups, **options)
    else:
        first = references == "own first"
        if first:
            y[:37], others[:37] = x, groups
        got = fastsim.hardest_pairs(x, groups, y, others, own_first=first, **options)
    apart, own, different = loops(x, groups, y, others, references != "others", distance)
    formula, eps = of_pairs(distance), torch.finfo(torch.float32).eps
    sides = zip(got[:2], got[2:], (own, different), (-torch.inf, torch.inf), strict=True)
    for found, index, part, none in sides:
        some = part.any(1)
        assert torch.equal(index == -1, ~some)
        assert (found[~some] == none).all()
        rows, index = torch.where(some)[0], index[some]
        assert part[rows, index].all()
        harder = apart.where(part, none)[rows]
        best = harder.argmax(1) if none < 0 else harder.argmin(1)
        truth, hardest = apart[rows, index], apart[rows, best]
        pairs = [x[rows], y[index]]
        (moved,) = conditioning(formula, [side.double() for side in pairs])
        given = torch.float32, 1.0, eps * moved
        assert_close("distances", found[some], truth, *formula(pairs), *given)
        # Of two that are as far but for the rounding of what they are compared by, either.
        assert_close("the hardest", truth, hardest, *formula([x[rows], y[best]]), *given)
    assert got.positive_index[0] == -1


@pytest.mark.parametrize("backend", BACKENDS)
def test_duplicates_have_distance_zero_and_no_nan(backend, usable):
    """Far from the origin, where |a|^2 - 2ab + |b|^2 cancels: the pairs' own distances do not."""
    usable(backend)
    x = (torch.randn(1, 12).repeat(6, 1) + 1000).requires_grad_()
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    hardest = fastsim.hardest_pairs(x, groups, backend=backend)
    assert (hardest.positive == 0).all()
    assert (hardest.negative == 0).all()
    loss = fastsim.batch_hard_triplet(x, groups, margin=0.5, backend=backend)
    assert loss == 0.5
    (grad,) = torch.autograd.grad(loss, x)
    assert (grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equals(backend, usable, small_panels):
    """Whichever panel the others are in."""
    usable(backend)
    rows = torch.eye(4)
    x = rows[:2].repeat(20, 1)
    y = torch.cat([rows[2:].repeat(20, 1), rows[:2].repeat(100, 1)])
    mine, others = torch.zeros(len(x), dtype=torch.long), torch.ones(len(y), dtype=torch.long)
    options = {"distance": "cosine", "backend": backend}
    nearest = fastsim.hardest_pairs(x, mine, y, others, **options).negative_index
    farthest = fastsim.hardest_pairs(x, mine, -y, others - 1, **options).positive_index
    assert nearest.tolist() == farthest.tolist() == [40, 41] * 20


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_group_gives_zero(backend, distance, soft, usable):
    usable(backend)
    x = torch.randn(8, 5, requires_grad=True)
    for groups in (torch.zeros(8, dtype=torch.long), torch.arange(8)):
        options = {"distance": distance, "soft": soft, "backend": backend}
        loss = fastsim.batch_hard_triplet(x, groups, **options)
        assert loss == 0
        assert (torch.autograd.grad(loss, x)[0] == 0).all()


@pytest.fixture(params=["kernels", "formulas"])
def rows_by(request, monkeypatch, usable):
    """The CPU backend with its own operators on rows, or with the formulas of those without."""
    usable("cpu")
    if request.param == "formulas":
        for name in ("centred", "chosen_rows", "chosen_rows_backward"):
            monkeypatch.setattr(CpuBackend, name, getattr(Backend, name))


@pytest.mark.parametrize("size", [1e-40, 1e-15, 1e15])
def test_any_size_of_embeddings(size, rows_by):
    """Squares of these leave the range of float32 or fall below every score left out; one over the
    smallest is beyond it.
    """
    x, groups = torch.randn(30, 7) * size, torch.randperm(30) % 4
    exact = (x.double() / size).requires_grad_()
    wanted = fastsim.hardest_pairs(exact, groups, backend="cpu")
    x.requires_grad_()
    got = fastsim.hardest_pairs(x, groups, backend="cpu")
    kind, every = torch.finfo(torch.float32), torch.arange(30)
    apart = torch.linalg.vector_norm(exact[:, None] - exact, dim=2).detach()
    # A subnormal number has a step; both ends of a pair are rounded to it when they are centred.
    step = kind.smallest_normal * kind.eps / size
    for mine, truth, own, other in zip(got[:2], wanted[:2], got[2:], wanted[2:], strict=True):
        truth_now = truth.detach()
        rounding = 4 * kind.eps * truth_now + 2 * 7**0.5 * step
        assert ((apart[every, own] - truth_now).abs() <= rounding).all()
        assert ((mine.detach().double() / size - truth_now).abs() <= rounding).all()
        # The gradient of a distance is a unit vector, whatever the size of the embeddings.
        same = own == other
        (grad,) = torch.autograd.grad(mine[same].sum(), x, retain_graph=True)
        (direction,) = torch.autograd.grad(truth[same].sum(), exact, retain_graph=True)
        limit = 30 * (rounding / truth_now).max()
        assert ((grad.double() - direction).abs() <= limit).all()


def test_errors():
    x, groups = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(ValueError, match="distance: wanted one of"):
        fastsim.hardest_pairs(x, groups, distance="manhattan")
    with pytest.raises(ValueError, match="references: wanted with reference_groups"):
        fastsim.hardest_pairs(x, groups, x)
    with pytest.raises(ValueError, match="references: wanted at least 4 rows with own_first"):
        fastsim.hardest_pairs(x, groups, x[:2], groups[:2], own_first=True)
    with pytest.raises(ValueError, match="soft: wanted one of"):
        fastsim.batch_hard_triplet(x, groups, soft="yes")

"""The hardest pairs by group: against loops, references, ties, zero distance, any origin."""

import pytest
import torch

import fastsim
from fastsim.backends.base import Backend
from fastsim.backends.cpu.backend import CpuBackend

BACKENDS = tuple(fastsim.backends())


def loops(x, groups, y, others, skip, distance):
    """(positive, negative, their indices) by looking at one pair after the other in float64."""
    found = []
    for i, a in enumerate(x.double()):
        far, near = (-torch.inf, -1), (torch.inf, -1)
        for j, b in enumerate(y.double()):
            if distance == "cosine":
                d = 1 - torch.dot(a, b) / (a.norm() * b.norm())
            else:
                d = (a - b).norm()
            if groups[i] == others[j]:
                if not (skip and i == j) and d > far[0]:
                    far = (d.item(), j)
            elif d < near[0]:
                near = (d.item(), j)
        found.append((far[0], near[0], far[1], near[1]))
    return tuple(torch.tensor(part) for part in zip(*found, strict=True))


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("references", ["none", "others", "own first"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_loops(backend, references, distance, usable, small_panels):
    usable(backend)
    x, groups = torch.randn(37, 9), torch.randint(0, 6, (37,))
    groups[0] = 7  # alone, and without a positive anywhere
    y, others = torch.randn(141, 9), torch.randint(0, 6, (141,))
    options = {"distance": distance, "backend": backend}
    if references == "none":
        got = fastsim.hardest_pairs(x, groups, **options)
        wanted = loops(x, groups, x, groups, True, distance)
    else:
        first = references == "own first"
        if first:
            y[:37], others[:37] = x, groups
        got = fastsim.hardest_pairs(x, groups, y, others, own_first=first, **options)
        wanted = loops(x, groups, y, others, first, distance)
    for mine, truth in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine.double(), truth.double(), rtol=1e-6, atol=1e-6)
    for mine, truth in zip(got[2:], wanted[2:], strict=True):
        assert torch.equal(mine, truth)
    assert got.positive_index[0] == -1
    assert got.positive[0] == -torch.inf


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
    with pytest.raises(ValueError, match="references: wanted together"):
        fastsim.hardest_pairs(x, groups, x)
    with pytest.raises(ValueError, match="references: wanted at least 4 rows with own_first"):
        fastsim.hardest_pairs(x, groups, x[:2], groups[:2], own_first=True)
    with pytest.raises(ValueError, match="soft: wanted one of"):
        fastsim.batch_hard_triplet(x, groups, soft="yes")

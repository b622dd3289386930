"""The numbers that the formulas were first worked out with by hand."""

import pytest
import torch

import fastsim
from fastsim import losses

SCORES = torch.tensor(
    [
        [0.9, -0.8, 0.3, -0.5],
        [-0.4, 0.5, 0.1, -0.1],
        [0.3, 0.1, -0.4, -0.8],
        [-0.5, -0.2, -0.7, 0.5],
    ]
)


def test_full_triplet():
    mean = losses.mean_negative_from_scores(SCORES)
    torch.testing.assert_close(mean, torch.tensor([-1 / 3, -2 / 15, -2 / 15, -7 / 15]))
    closest, index = losses.closest_negative_from_scores(SCORES)
    torch.testing.assert_close(closest, torch.tensor([0.3, 0.1, -0.8, -0.2]))
    assert index.tolist() == [2, 2, 3, 1]
    rows = losses.full_triplet_from_scores(SCORES, margin=0.25, reduction="none")
    torch.testing.assert_close(rows, torch.tensor([0.0, 0.0, 0.51666667, 0.0]))
    total = losses.full_triplet_from_scores(SCORES, margin=0.25, reduction="sum")
    assert round(total.item(), 3) == 0.517


@pytest.mark.parametrize("backend", fastsim.backends())
def test_cosines(backend, usable):
    usable(backend)
    a = torch.tensor([[1.0, 2.0, 3.0]])
    others = torch.tensor([[1, 2, 3.5], [1, 2, 3], [-1, -2, -3], [0, -42, 1]])
    wanted = torch.tensor([0.9974, 1.0, -1.0, -0.5153])
    got = fastsim.cosine_similarity(a, others, backend=backend)[0]
    assert ((got - wanted).abs() < 5e-5).all()
    paired = fastsim.paired_cosine_similarity(a.expand(4, 3), others, backend=backend)
    assert ((paired - wanted).abs() < 5e-5).all()


def test_triplet_margin():
    anchor, near = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    far, middle = torch.tensor([[0.0, 2.5]]), torch.tensor([[0.0, 1.2]])
    assert fastsim.triplet_margin(anchor, near, far, margin=1.0).item() == 0
    assert fastsim.triplet_margin(anchor, near, middle, margin=1.0).item() == pytest.approx(0.8)


@pytest.mark.parametrize("backend", fastsim.backends())
def test_matrix_cross_entropy_is_torchs(backend, usable):
    usable(backend)
    x, y = torch.randn(9, 5), torch.randn(12, 5)
    targets = torch.rand(9, 12) * 2 - 1
    scores = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
    wanted = torch.nn.CrossEntropyLoss()(scores / 0.3, targets)
    got = fastsim.matrix_cross_entropy(x, y, targets, temperature=0.3, backend=backend)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("loss", [fastsim.siglip, fastsim.matrix_mse, fastsim.cosent_matrix])
@pytest.mark.parametrize("backend", fastsim.backends())
def test_descent_separates_groups(loss, backend, usable):
    usable(backend)
    vectors = torch.randn(24, 8, requires_grad=True)
    groups = torch.arange(24) % 6
    same = groups[:, None] == groups[None, :]
    targets = torch.where(same, 1, -1)
    optimizer = torch.optim.Adam([vectors], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        loss(vectors, vectors, targets, backend=backend).backward()
        optimizer.step()
    scores = fastsim.cosine_similarity(vectors.detach(), backend=backend)
    assert scores[same].min() > scores[~same].max()

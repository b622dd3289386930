"""The full triplet loss of a batch that is not small: one operator against the formula by rows."""

import pytest
import torch

from fastsim.backends import get
from fastsim.backends.cpu import sizes
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.measure import assert_close, conditioning
from tests.seeds import fresh
from tests.threads import assert_same_bits

MARGIN = 0.3
# Rows and columns: units of rows and parts of columns that are not whole, and one of each.
SHAPES = [(1, 2, 5), (25, 40, 16), (130, 700, 33), (410, 520, 20)]


def loss_by_rows(x, y, weights, *, positives, mining):
    """The weighted sum of the losses, a row at a time."""
    x, y = (side / side.norm(dim=1, keepdim=True) for side in (x, y))
    total = x.new_zeros(())
    for i, own in enumerate(positives.tolist()):
        scores = y @ x[i]
        negative = torch.arange(len(y)) != own
        near = negative if mining == "hard" else negative & (scores <= scores[own])
        mean = (scores * negative).sum() / (len(y) - 1)
        terms = torch.relu(mean - scores[own] + MARGIN)
        if near.any():
            terms = terms + torch.relu(scores[near].max() - scores[own] + MARGIN)
        total = total + weights[i] * terms
    return total


def by_formula(tensors, **options):
    x, y, weights = tensors
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    loss = loss_by_rows(x, y, weights, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (x, y))]


def by_operator(x, y, weights, *, positives, mining):
    tile = TileLoss(f"{mining}_triplet", Pairs(positives), margin=MARGIN)
    loss, *grads, _ = get("cpu").in_one_call(tile, x, y, 1.0, 0.0, weights, (True, True))
    return [loss, *grads]


def batch(shape, where, seed):
    rows, columns, width = shape
    random = fresh(seed)
    x, y = (torch.randn(n, width, generator=random) for n in (rows, columns))
    positives = torch.arange(rows)
    if where == "anywhere":
        positives = torch.randint(columns, (rows,), generator=random)
    y[positives] = x + 0.7 * torch.randn(x.shape, generator=random)
    return x, y, torch.rand(rows, generator=random), positives


@pytest.fixture
def large(usable, monkeypatch):
    """Batches of any size are served as large ones."""
    usable("cpu")
    monkeypatch.setattr(sizes, "CHEAP", -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mining", ["hard", "semi-hard"])
@pytest.mark.parametrize("where", ["diagonal", "anywhere"])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_by_rows(shape, where, mining, dtype, large):
    x, y, weights, positives = batch(shape, where, 61)
    x, y = x.to(dtype), y.to(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    weights = weights.to(compute)
    options = {"positives": positives, "mining": mining}
    got = by_operator(x, y, weights, **options)
    doubled = [x.double(), y.double(), weights.double()]
    truth = by_formula(doubled, **options)
    dense = by_formula([x.to(compute), y.to(compute), weights], **options)
    moved = conditioning(lambda tensors: by_formula(tensors, **options), doubled)
    names = "loss", "dL/dx", "dL/dy"
    for name, *values, by in zip(names, got, truth, dense, moved, strict=True):
        eps = torch.finfo(compute).eps
        size = weights.sum().item() if name == "loss" else 0.0
        assert_close(name, *values, compute, size, by * eps)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_bits_of_any_number_of_threads(shape, large):
    x, y, weights, positives = batch(shape, "anywhere", 62)
    options = {"positives": positives, "mining": "semi-hard"}
    assert_same_bits(lambda: by_operator(x, y, weights, **options), (1, 2, 3, 7))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_loss(bad, large):
    x, y, weights, positives = batch(SHAPES[2], "diagonal", 63)
    y[3, 1] = bad
    loss = by_operator(x, y, weights, positives=positives, mining="hard")[0]
    assert loss.isnan()


def test_a_row_of_zeros_has_no_gradient(large):
    x, y, weights, positives = batch(SHAPES[2], "diagonal", 64)
    x[5], y[7] = 0.0, 0.0
    _, grad_x, grad_y = by_operator(x, y, weights, positives=positives, mining="semi-hard")
    assert (grad_x[5] == 0).all()
    assert (grad_y[7] == 0).all()
    assert torch.cat([grad_x, grad_y]).isfinite().all()

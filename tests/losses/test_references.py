"""Losses by group against references: other embeddings, or a memory that begins with the batch."""

import pytest
import torch

import fastsim
from fastsim.losses import SPECIFICATIONS
from tests import oracles

BACKENDS = tuple(fastsim.backends())
LOSSES = (fastsim.sup_con, fastsim.nt_xent, fastsim.multi_similarity, fastsim.circle)


def gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def reduced(loss, reduction, *given, own_first):
    """The losses of the oracle, and what the mean of each runs over."""
    losses = getattr(oracles, loss.__name__)(*given, own_first=own_first)
    if reduction != "mean":
        return losses if reduction == "none" else losses.sum()
    mates = [len(mates) for mates, _ in oracles.compared(*given, own_first)[1]]
    counts = {fastsim.sup_con: sum(map(bool, mates)), fastsim.nt_xent: sum(mates)}
    return losses.sum() / counts.get(loss, len(mates))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_equals_the_oracle(loss, backend, own_first, reduction, usable, small_panels):
    usable(backend)
    x = torch.randn(29, 9, dtype=torch.float64, requires_grad=True)
    y = torch.randn(141, 9, dtype=torch.float64, requires_grad=True)
    given = x, torch.randint(0, 5, (29,)), y, torch.randint(0, 5, (141,))
    given[1][:2], given[3][-1] = torch.tensor([5, 6]), 6  # rows with no positive, and with one
    weights = torch.rand(29, dtype=torch.float64)
    got = loss(*given, own_first=own_first, reduction=reduction, backend=backend)
    wanted = reduced(loss, reduction, *given, own_first=own_first)
    got, wanted = ((v * weights).sum() if v.dim() else v for v in (got, wanted))
    for mine, truth in zip(gradients(got, x, y), gradients(wanted, x, y), strict=True):
        torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_the_specification_equals_the_oracle(loss, own_first, reduction):
    x, y = torch.randn(7, 9, dtype=torch.float64), torch.randn(12, 9, dtype=torch.float64)
    given = x, torch.randint(0, 4, (7,)), y, torch.randint(0, 4, (12,))
    options = {"own_first": own_first, "reduction": reduction}
    got = SPECIFICATIONS[loss](oracles.cosines(x, y), *given[1::2], **options)
    torch.testing.assert_close(got, reduced(loss, reduction, *given, own_first=own_first))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_its_own_references_are_the_batch(loss, backend, usable):
    usable(backend)
    x = torch.randn(23, 6, requires_grad=True)
    groups = torch.randint(0, 7, (23,))
    alone = gradients(loss(x, groups, backend=backend), x)
    copy = x.detach().clone().requires_grad_()
    both = loss(x, groups, copy, groups, own_first=True, backend=backend)
    value, grad, grad_copy = gradients(both, x, copy)
    torch.testing.assert_close(value, alone[0])
    torch.testing.assert_close(grad + grad_copy, alone[1])


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_errors(loss):
    x, groups = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(ValueError, match="references: wanted with reference_groups"):
        loss(x, groups, x)
    with pytest.raises(ValueError, match="references: wanted at least 4 rows with own_first"):
        loss(x, groups, x[:2], groups[:2], own_first=True)
    with pytest.raises(ValueError, match="reference_groups: wanted 3 entries"):
        loss(x, groups, x[:3], groups)
    with pytest.raises(ValueError, match="own_first: wanted one of"):
        loss(x, groups, own_first=2)
    with pytest.raises(ValueError, match="scores: wanted a square matrix"):
        SPECIFICATIONS[loss](torch.randn(4, 3), groups)

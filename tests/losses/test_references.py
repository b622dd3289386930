"""Losses by group against references: other embeddings, or a memory that begins with the batch."""

import pytest
import torch

import fastsim
from fastsim.losses import SPECIFICATIONS
from tests.oracles import cosines

BACKENDS = tuple(fastsim.backends())
LOSSES = (fastsim.sup_con, fastsim.nt_xent, fastsim.multi_similarity, fastsim.circle)


def gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("own_first", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_equals_the_specification(loss, backend, own_first, reduction, usable, small_panels):
    usable(backend)
    x = torch.randn(29, 9, dtype=torch.float64, requires_grad=True)
    y = torch.randn(141, 9, dtype=torch.float64, requires_grad=True)
    groups, others = torch.randint(0, 5, (29,)), torch.randint(0, 5, (141,))
    options = {"own_first": own_first, "reduction": reduction}
    weights = torch.rand(29, dtype=torch.float64)
    got = loss(x, groups, y, others, **options, backend=backend)
    wanted = SPECIFICATIONS[loss](cosines(x, y), groups, others, **options)
    got, wanted = ((v * weights).sum() if v.dim() else v for v in (got, wanted))
    for mine, truth in zip(gradients(got, x, y), gradients(wanted, x, y), strict=True):
        torch.testing.assert_close(mine, truth)


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
    with pytest.raises(ValueError, match="references: wanted together"):
        loss(x, groups, x)
    with pytest.raises(ValueError, match="references: wanted at least 4 rows with own_first"):
        loss(x, groups, x[:2], groups[:2], own_first=True)
    with pytest.raises(ValueError, match="reference_groups: wanted 3 entries"):
        loss(x, groups, x[:3], groups)
    with pytest.raises(ValueError, match="own_first: wanted one of"):
        loss(x, groups, own_first=2)
    with pytest.raises(ValueError, match="scores: wanted a square matrix"):
        SPECIFICATIONS[loss](torch.randn(4, 3), groups)

"""A loss of which no gradient is wanted: a shorter way to the same number."""

import pytest
import torch

import fastsim
from tests.cases import CASES, inputs

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.skipif(fastsim.backends()["cpu"] is not None, reason="needs the C++ extension")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.tile], ids=str)
def test_the_loss_is_the_same_to_the_last_bit(case, dtype):
    """With and without torch.no_grad, and of leaves that want no gradient."""
    tensors, others, options = inputs(case, (13, 29, 18), dtype, seed=torch.initial_seed())
    leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
    with_gradients = case.loss(*leaves, *others, **options, backend="cpu")
    with torch.no_grad():
        without = case.loss(*leaves, *others, **options, backend="cpu")
    plain = case.loss(*tensors, *others, **options, backend="cpu")
    assert with_gradients.requires_grad
    assert not without.requires_grad
    assert without.dtype == with_gradients.dtype
    assert torch.equal(without, with_gradients.detach())
    assert torch.equal(plain, without)

"""Unit rows written in their own type, and their gradients: the bits of the steps one by one."""

import pytest
import torch

from fastsim.backends import bands
from fastsim.backends.torch import rows
from fastsim.precision import inverse_norms

N, D = 37, 5
TYPES = [(torch.bfloat16, torch.float16), (torch.float16, torch.float16), (torch.float32,) * 2]


@pytest.fixture(params=["one band", "bands"])
def in_bands(request, monkeypatch):
    if request.param == "bands":
        monkeypatch.setattr(bands, "numbers_of_a_band", lambda *_: 3 * D)


@pytest.mark.parametrize(("dtype", "operand"), TYPES, ids=str)
def test_unit_rows(dtype, operand, in_bands):
    x = torch.randn(N, D).to(dtype)
    x[3] = 0
    unit, inverse = rows.unit_rows(x, operand)
    wide = x.float()
    known = inverse_norms(wide).float()
    assert torch.equal(inverse, known)
    assert torch.equal(unit, (wide * known[:, None]).to(operand))


@pytest.mark.parametrize(("dtype", "operand"), TYPES, ids=str)
def test_their_gradients(dtype, operand, in_bands):
    x, grad, factor = torch.randn(N, D).to(dtype), torch.randn(N, D), torch.tensor(0.25)
    _, inverse = rows.unit_rows(x, operand)
    found, dots = rows.unit_rows_backward(grad, x, inverse, factor, dtype)
    unit = x.double() / x.double().norm(dim=1, keepdim=True)
    along = (unit * grad).sum(1, keepdim=True)
    wanted = 0.25 * (grad - along * unit) / x.double().norm(dim=1, keepdim=True)
    assert found.dtype == dtype
    torch.testing.assert_close(dots.double(), along[:, 0], rtol=0, atol=1e-5)
    rounding = torch.finfo(dtype).eps + D * torch.finfo(torch.float32).eps
    assert (found - wanted).abs().max() <= rounding * wanted.abs().max()


def test_small_rows_of_float16_have_norms():
    """Smaller ones than its least normal number: norms are of the compute type."""
    x = torch.full((2, D), 1e-6, dtype=torch.float16)
    unit, inverse = rows.unit_rows(x, torch.float16)
    assert inverse.isfinite().all()
    torch.testing.assert_close(unit.float().norm(dim=1), torch.ones(2), rtol=1e-3, atol=0)

"""A side that asks for no gradient costs no product for one."""

import pytest
import torch

import fastsim
from fastsim.backends import get

BACKENDS = ("cpu", "torch")
LOSSES = {
    "info_nce": lambda x, y, **options: fastsim.info_nce(x, y, **options),
    "info_nce symmetric": lambda x, y, **options: fastsim.info_nce(x, y, symmetric=True, **options),
    "siglip": lambda x, y, **options: fastsim.siglip(x, y, **options),
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOSSES)
def test_only_the_products_of_the_other_side(
    name, backend, reduction, usable, in_passes, small_panels, monkeypatch
):
    usable(backend)
    kind, shapes = type(get(backend)), []
    multiply = kind.multiply

    def counted(self, left, right, out, *, accumulate):
        shapes.append(tuple(out.shape))
        return multiply(self, left, right, out, accumulate=accumulate)

    monkeypatch.setattr(kind, "multiply", counted)
    loss, counts = LOSSES[name], {}
    x, y = torch.randn(24, 6), torch.randn(90, 6)
    for wants in ((True, True), (True, False), (False, True)):
        shapes.clear()
        sides = [t.clone().requires_grad_(want) for t, want in zip((x, y), wants, strict=True)]
        loss(*sides, backend=backend, reduction=reduction).sum().backward()
        counts[wants] = len(shapes)
        for side, want in zip(sides, wants, strict=True):
            assert (side.grad is not None) == want
    both, of_x, of_y = counts[True, True], counts[True, False], counts[False, True]
    assert of_x > 0
    assert of_y > 0
    assert of_x + of_y == both

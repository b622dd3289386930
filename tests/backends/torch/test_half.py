"""16-bit operands, as on a device that multiplies them into float32 scores, played on a CPU.

The error may be twice that of the dense formula on unit rows rounded to float16, and a rounding to
float16 of the largest entry.
"""

import pytest
import torch

import fastsim
from fastsim import losses
from fastsim.backends.base import Backend
from fastsim.backends.torch import panels
from fastsim.backends.torch.backend import TorchBackend

SPECIFICATIONS = {function.__name__: dense for function, dense in losses.SPECIFICATIONS.items()}


@pytest.fixture(autouse=True, params=["small batch", "panels"])
def half(request, monkeypatch):
    if request.param == "panels":
        request.getfixturevalue("small_panels")
    monkeypatch.setattr(panels, "half_products", lambda *_: True)
    monkeypatch.setattr(TorchBackend, "number", Backend.number)


def unit(x, rounded):
    rows = x / x.norm(dim=1, keepdim=True)
    return rows + (rows.half().to(rows.dtype) - rows).detach() if rounded else rows


def by_formula(name, sides, given, options, *, rounded):
    leaves = [side.detach().clone().requires_grad_() for side in sides]
    x, y = (unit(leaf, rounded) for leaf in leaves)
    value = SPECIFICATIONS[name](x @ y.T, *given, **options)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("info_nce", {}),
        ("info_nce", {"symmetric": True, "reduction": "sum"}),
        ("siglip", {}),
        ("full_triplet", {"mining": "hard"}),
        ("matrix_mse", {}),
    ],
)
def test_against_the_formula(name, options, dtype, size):
    sides = [torch.randn(n, 40).to(dtype) for n in (23, 61)]
    given = [torch.randint(-1, 2, (23, 61))] if name == "matrix_mse" else []
    truth = by_formula(name, [s.double() for s in sides], given, options, rounded=False)
    dense = by_formula(name, [s.float() for s in sides], given, options, rounded=True)
    leaves = [side.clone().requires_grad_() for side in sides]
    value = getattr(fastsim, name)(*leaves, *given, **options, backend="torch")
    (size * value).backward()
    got = [value.detach(), *(leaf.grad.double() / size for leaf in leaves)]
    for mine, theirs, right in zip(got, dense, truth, strict=True):
        error, others = ((part - right).abs().max().item() for part in (mine, theirs))
        # A gradient in float16 has no digits below its smallest number.
        least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / size
        largest = right.abs().max().item()
        assert error <= 2 * (others + torch.finfo(dtype).eps * largest + least)


DOT = {
    "info_nce": (fastsim.info_nce, {"symmetric": True}, 2),
    "above": (fastsim.info_nce, {"exclude_above": 40.0, "reduction": "sum"}, 2),
    "siglip": (fastsim.siglip, {"bias": -1.0}, 2),
    "matrix_cross_entropy": (fastsim.matrix_cross_entropy, {"targets": None}, 2),
    "nt_xent": (fastsim.nt_xent, {"groups": torch.arange(23) % 5}, 1),
}


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-9, 1e-9), (1e12, 1e-12), (1e12, 1e3)], ids=str)
@pytest.mark.parametrize("name", DOT)
def test_dot_products_of_bfloat16_rows(name, sizes):
    """The value of float32 rows; gradients off by no more than the last rounding, at any size.

    A row is up to 2^20 times as large as another.
    """
    loss, options, count = DOT[name]
    sizes = sizes if count == 2 else (sizes[0],) * 2
    scale = 0.05 / (sizes[0] * sizes[1])
    number = {"scale": scale} if name == "siglip" else {"temperature": 1 / scale}
    if name == "above":
        options = options | {"exclude_above": options["exclude_above"] / scale}
    near = torch.logspace(-20, 0, 23, base=2)[:, None]
    sides = [torch.randn(23, 40) * near * sizes[0], torch.randn(23, 40) * sizes[1]][:count]
    sides = [side.bfloat16() for side in sides]

    def found(dtype, backend):
        leaves = [side.to(dtype).requires_grad_() for side in sides]
        value = loss(*leaves, **number, **options, similarity="dot", backend=backend)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    value, *grads = found(torch.bfloat16, "torch")
    right, *others = found(torch.float64, "eager")
    plain, *_ = found(torch.float32, "eager")
    eps = torch.finfo(torch.float32).eps
    assert abs(value - right) <= 2 * (abs(plain - right) + eps * abs(right))
    for grad, other in zip(grads, others, strict=True):
        # A score gradient of float16, and the rounding of the result.
        half = torch.finfo(torch.float16).eps * other.abs().amax()
        assert grad.dtype == torch.bfloat16
        assert ((grad - other).abs() <= torch.finfo(torch.bfloat16).eps * other.abs() + half).all()

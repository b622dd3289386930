"""Every loss on a device without float64, as MPS: played by a CPU on which any such tensor raises.

What the device itself computes is not tested here, and has not been: no such device was at hand.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastsim
from fastsim import operators, precision
from tests import test_metrics
from tests.cases import CASES, takes_backend
from tests.losses import test_losses
from tests.losses.test_losses import compare
from tests.measure import assert_close, conditioning


class NoFloat64(TorchDispatchMode):
    """An error where an operation takes or makes a float64 tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                raise TypeError(f"{function} on a device without float64")
        return result


def narrow(value):
    """Labels, biases and guides as such a device may have them."""
    if isinstance(value, tuple):
        return tuple(map(narrow, value))
    wide = isinstance(value, torch.Tensor) and value.dtype == torch.float64
    return value.float() if wide else value


def narrowed(others, options):
    return [narrow(other) for other in others], {n: narrow(v) for n, v in options.items()}


@pytest.fixture(autouse=True)
def without_float64(monkeypatch):
    """Losses of float32 inputs, the oracle apart, run where float64 is an error."""
    monkeypatch.setattr(precision, "WITHOUT_FLOAT64", {"cpu"})
    # So that our operators are looked into rather than taken for one operation.
    monkeypatch.setattr(operators, "is_in_torch_dispatch_mode", lambda: False)
    called, seen_by = test_losses.call, test_metrics.seen_by

    def call(loss, tensors, others, options):
        if options.get("backend") != "torch":
            return called(loss, tensors, others, options)
        others, options = narrowed(others, options)
        with NoFloat64():
            return called(loss, tensors, others, options)

    def seen(case, tensors, others, options, **extra):
        others, options = narrowed(others, options)
        with NoFloat64():
            return seen_by(case, tensors, others, options, **extra)

    monkeypatch.setattr(test_losses, "call", call)
    monkeypatch.setattr(test_metrics, "seen_by", seen)


@pytest.mark.parametrize("case", [case for case in CASES if takes_backend(case)], ids=repr)
def test_every_loss(case):
    compare(case, "torch", torch.float32, (13, 29, 18), seed=3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("case", [case for case in CASES if case.tile], ids=repr)
def test_many_panels(case, reduction, small_panels):
    shape = (26, 41, 18) if case.largest >= 10_000 else (13, 41, 18)
    extra = {"reduction": reduction} if case.reduces else {}
    compare(case, "torch", torch.float32, shape, seed=5, **extra)


@pytest.mark.parametrize("case", test_metrics.SEEN, ids=repr)
def test_metrics_of_every_loss(case):
    test_metrics.compare(case, "torch", (13, 29, 18), seed=5, dtype=torch.float32)


@pytest.mark.parametrize("case", test_metrics.SEEN, ids=repr)
def test_metrics_of_many_panels(case, small_panels, in_passes):
    test_metrics.compare(case, "torch", (13, 29, 18), seed=6, dtype=torch.float32)


def cosines(x, y):
    x, y = (side / side.norm(dim=1, keepdim=True) for side in (x, y))
    return x @ y.T


def assert_sums_are_exact(loss, formula, sides, size=0.0):
    """Held to the formula of float32 scores whose sums are taken in float64. size: of its terms."""
    found = loss(*sides)
    wide = [side.double() for side in sides]
    truth, dense = formula(*map(cosines, wide, wide[1:])), formula(cosines(*sides).double())
    (moved,) = conditioning(lambda sides: [formula(cosines(*sides))], wide)
    eps = torch.finfo(torch.float32).eps
    assert_close("losses", found, truth, dense, torch.float32, size, eps * moved)


def test_sums_of_many_panels(small_panels):
    """So many terms that rounding takes tens of eps if nothing is kept of it."""
    sides = torch.tensor([[1.0, 0.3]] * 8), torch.tensor([[0.2, 1.0]]).repeat(40_000, 1)
    options = {"scale": 1.0, "bias": 0.0, "reduction": "none", "backend": "torch"}

    def loss(x, y):
        return fastsim.siglip(x, y, -torch.ones(len(x), len(y)), **options)

    assert_sums_are_exact(loss, lambda s: torch.nn.functional.softplus(s).sum(1), sides)


def test_what_sums_have_lost_shrinks_with_them(small_panels):
    """The last column outweighs all before it, and with them what their sum has lost."""
    angles = torch.cat([1.1 + 0.4 * torch.rand(10_000), torch.zeros(1)])
    x, y = torch.tensor([[1.0, 0.0]] * 8), torch.stack([angles.cos(), angles.sin()], 1)
    positives = torch.full((8,), 10_000)
    options = {"temperature": 0.03, "reduction": "none", "backend": "torch"}

    def formula(scores):
        return -torch.log_softmax(scores / 0.03, 1)[:, -1]

    assert_sums_are_exact(
        lambda x, y: fastsim.info_nce(x, y, positives, **options), formula, (x, y), size=1 / 0.03
    )


def test_a_float64_would_show():
    with pytest.raises(TypeError, match="without float64"), NoFloat64():
        torch.ones(2).double()

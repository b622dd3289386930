"""The kernels of a small batch under the interpreter: against loops in float64, and at their edges.

What is the same for a small batch and for panels is in test_edges.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from fastsim import losses
from fastsim.backends.triton.backend import TritonBackend
from fastsim.backends.triton.small_batch import SmallBatch
from fastsim.engine import autograd
from fastsim.engine.one_call_loss import OneCallLoss
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.backends.triton.interpreted.test_losses import CASES, compare, nce

MADE = {
    "info_nce": CASES["info_nce"],
    "info_nce exclude": CASES["info_nce exclude"],
    "info_nce own": lambda n, m: nce(n, m, symmetric=True, own=True),
    "info_nce own exclude": lambda n, m: nce(
        n, m, symmetric=True, exclude=True, margin=0.1, own=True
    ),
    "sup_con": CASES["sup_con"],
    "siglip diagonal": CASES["siglip diagonal"],
    "siglip groups": CASES["siglip groups"],
    "full_triplet hard": CASES["full_triplet hard"],
    "full_triplet semi-hard": CASES["full_triplet semi-hard"],
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
tile = autograd._tile  # the operator, before a test replaces it


@pytest.fixture
def served(monkeypatch):
    """The kinds of the losses that were made this way."""
    kinds, original = [], SmallBatch.in_one_call

    def noted(self, tile, *given):
        kinds.append(tile.kind)
        return original(self, tile, *given)

    monkeypatch.setattr(SmallBatch, "in_one_call", noted)
    return kinds


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MADE)
def test_loss(name, dtype, served):
    # The mean of sup_con is over rows that have a positive.
    reductions = ("sum",) if name == "sup_con" else ("mean", "sum")
    compare(name, MADE[name], dtypes=(dtype,), reductions=reductions)
    assert len(served) == 1


def test_a_copy_of_the_positive_is_semi_hard(served):
    x = torch.randn(20, 40).half()
    for columns in (torch.cat([x, x]), torch.cat([x, x[:7]])):
        found = losses.full_triplet(x, columns, margin=1.0, backend="triton")
        apart = losses.full_triplet(x, columns, margin=1.0, reduction="none", backend="triton")
        assert abs(found - apart.mean()) < 1e-6
    assert served == ["semi-hard_triplet"] * 2


def test_a_copy_that_a_library_has_rounded_up_is_semi_hard(served, monkeypatch):
    """Its product with the row may be made in another order than the positive's."""
    multiply = TritonBackend.multiply

    def rounded_up(self, left, right, out, *, accumulate):
        multiply(self, left, right, out, accumulate=accumulate)
        if out.shape == (20, 40):
            out[:, 20:] *= 1 + torch.finfo(torch.float32).eps

    x, y = torch.randn(20, 24), torch.randn(20, 24)
    found = []
    for product in (multiply, rounded_up):
        monkeypatch.setattr(TritonBackend, "multiply", product)
        loss = losses.full_triplet(x, torch.cat([y, y]), margin=1.0, backend="triton")
        found.append(loss)
    assert abs(found[0] - found[1]) <= 8 * torch.finfo(torch.float32).eps
    assert served == ["semi-hard_triplet"] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shared_positives_of_columns_go_another_way(count, served):
    """Their columns' score gradients grow with the rows that share them."""
    x, y = torch.randn(12, 8).half(), torch.randn(12, 8).half()
    positives = torch.arange(12) % (4 * count)
    losses.info_nce(x, y, positives, symmetric=True, backend="triton")
    assert not served


def test_small_gradients_of_a_learnt_batch(served):
    """Shares of 1e-7, which float16 holds by the factor that they are kept with."""
    x = torch.nn.functional.normalize(torch.randn(24, 64), dim=1)
    x, y = (x + 0.01 * torch.randn(24, 64) for _ in "xy")
    found = []
    for backend, wide in (("triton", torch.float16), ("eager", torch.float64)):
        a, b = (side.half().to(wide).requires_grad_() for side in (x, y))
        losses.info_nce(a, b, temperature=0.06, backend=backend).backward(
            torch.tensor(2.0**14, dtype=torch.float32 if wide == torch.float16 else wide)
        )
        found.append((a.grad, b.grad))
    assert found[1][0].abs().max() < 1
    for mine, truth in zip(*found, strict=True):
        rounding = 4 * torch.finfo(torch.float16).eps
        assert (mine.double() - truth).abs().max() <= rounding * truth.abs().max()
    assert served


def test_the_largest_that_is_served():
    serves = functools.partial(SmallBatch().serves_one_call, dtype=torch.float32)
    tile = TileLoss("softmax", Pairs(torch.arange(3)))
    assert serves(tile, 8192, 8192, 64, False)
    assert not serves(tile, 8193, 8192, 64, False)
    distinct = Pairs(torch.arange(3), distinct=True)
    for heavy in (
        TileLoss("sigmoid", distinct),
        TileLoss("softmax", distinct, symmetric=True),
    ):
        assert serves(heavy, 4096, 4096, 64, False)
        assert not serves(heavy, 4097, 4096, 64, False)
    assert serves(tile, 3, 8192, 64, False)
    assert not serves(tile, 3, 8193, 64, False)
    assert not serves(replace(tile, symmetric=True), 3, 3, 64, False)


def test_small_panels_that_are_asked_for(served, monkeypatch):
    x, y = torch.randn(20, 8), torch.randn(20, 8)
    monkeypatch.setenv("FASTSIM_PANEL_MB", "0.001")
    losses.info_nce(x, y, backend="triton")
    assert not served
    monkeypatch.setenv("FASTSIM_PANEL_MB", "0.002")
    losses.info_nce(x, y, backend="triton")
    assert served


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("learnt", ["x", "y", "temperature", "all"])
def test_opcheck(learnt, dtype, served, monkeypatch):
    """The operator returns what its fake says, whichever gradients are wanted."""
    calls = []
    monkeypatch.setattr(OneCallLoss, "serves", lambda *_: False)
    monkeypatch.setattr(autograd, "_tile", lambda *given: calls.append(given) or tile(*given))
    tensors = {"x": torch.randn(6, 9, dtype=dtype), "y": torch.randn(7, 9, dtype=dtype)}
    tensors["temperature"] = torch.tensor(0.3)
    for name, tensor in tensors.items():
        tensor.requires_grad_(learnt in (name, "all"))
    x, y, temperature = tensors.values()
    losses.info_nce(x, y, temperature=temperature, backend="triton")
    (given,) = calls
    opcheck(tile.operator, [a.detach() if isinstance(a, torch.Tensor) else a for a in given])
    assert served

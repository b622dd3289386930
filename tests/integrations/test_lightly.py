"""lightly's losses against ours in their place."""

import functools
import importlib
import itertools
import sys
import types

import pytest
import torch

from fastsim.integrations import dtypes
from tests.integrations.beside import compare
from tests.integrations.lone_peer import ROWS, WIDTH, alone, bare, doubling, mixed, of


@pytest.fixture
def lightly(monkeypatch):
    name = "lightly.models.modules.memory_bank"
    alone(monkeypatch, name, "lightly.models.utils")
    folder = sys.modules["lightly"].__path__[0]
    bare(monkeypatch, "lightly.utils", f"{folder}/utils")
    sys.modules["lightly.models"].utils = sys.modules["lightly.models.utils"]
    entropy = alone(monkeypatch, "lightly.loss.ntx_ent_loss")
    decoupled = alone(monkeypatch, "lightly.loss.dcl_loss")
    theirs = types.SimpleNamespace(**vars(entropy) | vars(decoupled))
    return importlib.import_module("fastsim.integrations.lightly"), theirs


LIGHTLY = [
    ("NTXentLoss", {}),
    ("NTXentLoss", {"temperature": 0.07}),
    ("DCLLoss", {}),
    ("DCLLoss", {"temperature": 0.5, "weight_fn": lambda x, y: 1 + (x * y).sum(1).detach()}),
    ("DCLLoss", {"weight_fn": lambda x, y: 0.7}),
    ("DCLLoss", {"weight_fn": lambda x, y: (x * y).mean().detach()}),
    ("DCLLoss", {"weight_fn": lambda x, y: (x * y).mean().detach()[None]}),
    ("DCLLoss", {"weight_fn": lambda x, y: 2 + x[:, 0].detach()}),  # not the same turned round
]


@pytest.mark.parametrize(("name", "options"), LIGHTLY)
def test_lightly(lightly, name, options):
    ours, theirs = lightly
    assert issubclass(getattr(ours, name), getattr(theirs, name))
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(getattr(ours, name)(**options), getattr(theirs, name)(**options), views)
    one = [view[:1] for view in views]
    torch.testing.assert_close(getattr(ours, name)(**options)(*one), getattr(theirs, name)()(*one))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_lightly_weights(lightly):
    ours, theirs = lightly
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    compare(ours.DCLWLoss(sigma=0.3), theirs.DCLWLoss(sigma=0.3), views)


def test_lightly_without_a_fused_form(lightly):
    ours, _ = lightly
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    values = []
    for package in lightly:
        loss = package.NTXentLoss()
        loss.cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")
        if package is ours:
            with pytest.warns(UserWarning, match="NTXentLoss: cross_entropy has no fused form"):
                values.append(loss(*views))
        else:
            values.append(loss(*views))
    assert torch.equal(*values)
    with pytest.warns(UserWarning, match="memory_bank_size has no fused form"):
        value = ours.NTXentLoss(memory_bank_size=(64, WIDTH))(*views)
    assert value.isfinite()


@pytest.mark.parametrize("name", ["NTXentLoss", "DCLLoss"])
def test_lightly_of_two_dtypes(lightly, name):
    given, plain = mixed([of(ROWS, WIDTH, seed=seed) for seed in (1, 2)])
    ours, theirs = (getattr(package, name)() for package in lightly)
    torch.testing.assert_close(ours(*given), ours(*plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*given).dtype == theirs(*given).dtype


def wide(x, y):
    return torch.ones(len(x))


def narrow(x, y):
    return torch.ones(len(x), dtype=x.dtype)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("weights", list(itertools.permutations([None, wide, narrow])))
def test_the_dtype_of_a_loss_with_weights(lightly, weights, wrapped, monkeypatch):
    """Whatever other loss of the class was computed before."""
    monkeypatch.setattr(dtypes, "_known", {})
    views = [of(ROWS, WIDTH, seed=seed).bfloat16() for seed in (1, 2)]
    for weight in weights:
        weight_fn = functools.partial(weight) if wrapped and weight is not None else weight
        ours, theirs = (package.DCLLoss(weight_fn=weight_fn)(*views) for package in lightly)
        assert ours.dtype == theirs.dtype
        assert (ours.dtype == torch.float32) == (weight is wide)


@pytest.mark.parametrize(
    ("name", "owner"),
    [("NTXentLoss", "NTXentLoss"), ("DCLLoss", "DCLLoss"), ("DCLWLoss", "DCLLoss")],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_patch_of_lightly(lightly, name, owner, monkeypatch):
    ours, theirs = (getattr(package, name)() for package in lightly)
    views = [of(ROWS, WIDTH, seed=seed) for seed in (1, 2)]
    plain = ours(*views)
    doubling(monkeypatch, getattr(lightly[1], owner), "forward")
    with pytest.warns(UserWarning, match=f"{name}: forward has no fused form"):
        value = ours(*views)
    assert torch.equal(value, theirs(*views))
    torch.testing.assert_close(value, 2 * plain)

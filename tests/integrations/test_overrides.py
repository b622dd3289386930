"""Which hook of a peer's class was replaced, whenever and however."""

import copy
import functools
import inspect
import linecache
import sys
import types
import warnings

import pytest
import torch

from fastsim.integrations.overrides import (
    Hooked,
    is_plain,
    no_fused_form,
    patched_attribute,
    stands_for,
    warn_once,
)


class Theirs:
    def hook(self):
        return "theirs"

    def other(self):
        return "theirs"


class Ours(Hooked, Theirs, hooks=("hook", "of_a_later_version")):
    """The fused form does not call `hook`."""

    _package = "some-peer"


def test_nothing_replaced():
    class Mine(Ours):
        def other(self):
            return "mine"

    for kind in (Ours, Mine):
        assert kind().replaced_hook() is None
    loss = Mine()
    loss.other = loss.hook
    assert loss.replaced_hook() is None


def test_every_way(monkeypatch):
    class Mine(Ours):
        def hook(self):
            return super().hook()

    loss = Ours()
    loss.hook = loss.hook
    assert Mine().replaced_hook() == loss.replaced_hook() == "hook"
    monkeypatch.setattr(Theirs, "hook", lambda self: "patched")
    assert Ours().replaced_hook() == "hook"
    monkeypatch.delattr(Theirs, "hook")
    assert Ours().replaced_hook() == "hook"


def within(package):
    """A function of a package that asks a loss whether it is unfused."""
    names = {"__name__": f"{package}.losses"}
    exec("def ask(loss):\n    return loss.is_unfused()", names)
    return names["ask"]


@pytest.mark.parametrize("package", ["some_peer", "fastsim", "torch", "other"])
def test_each_reason_is_said_once_of_each_class(package):
    """With the line that called the loss, from outside of the packages that are part of it."""
    ask = within(package)
    for kind in (Ours, type("Mine", (Ours,), {"_package": "some-peer"})):
        loss = kind()
        assert not ask(loss)
        loss.hook = len
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert ask(loss)  # this line
            assert ask(loss)
            for _ in range(2):
                warn_once(loss, no_fused_form("margin"), "peer")
        first, second = said
        assert str(first.message) == (
            f"{kind.__name__}: hook has been replaced; some-peer's own code computes the"
            " loss, without saving memory"
        )
        lines = [linecache.getline(w.filename, w.lineno) for w in said]
        assert ("# this line" in lines[0]) == (package != "other")
        assert "warn_once(" in lines[1]
        assert str(second.message).startswith(f"{kind.__name__}: margin has no fused form; peer's ")


def test_a_patch_before_ours_was_made():
    class Patched(Theirs):
        hook = inspect.cleandoc  # a function of another module

    class Late(Hooked, Patched, hooks=("hook", "other")):
        """Made when the hook was no longer theirs."""

    assert Late().replaced_hook() == "hook"


PEER = """
class Base:
    def step(self): pass

class Loss(Base):
    def __call__(self): pass
    def __repr__(self): pass
    def other(self): pass
    def get_config_dict(self): pass
"""
PATCHES = [("Base", "step"), ("Loss", "step"), ("Loss", "__call__")]
OF_OURS = dict.fromkeys(("step", "__call__", "__repr__", "get_config_dict"), lambda self: "ours")


@pytest.fixture
def peer(monkeypatch):
    """A module with a loss."""
    module = types.ModuleType("a_peer")
    exec(PEER, vars(module))
    monkeypatch.setitem(sys.modules, "a_peer", module)
    return module


@pytest.mark.parametrize(("owner", "name"), PATCHES)
def test_methods_of_theirs_that_ours_overrides(owner, name, peer, monkeypatch):
    ours = type("Loss", (Hooked, peer.Loss), OF_OURS)
    kinds = ours, type("Loss", (ours,), {"step": len}), type("Another", (ours,), {"step": len})
    for uncalled in ("other", "get_config_dict", "__repr__"):
        monkeypatch.setattr(peer.Loss, uncalled, lambda self: "patched")
    assert [kind().replaced_hook() for kind in kinds] == [None] * 3
    monkeypatch.setattr(getattr(peer, owner), name, lambda self: "patched", raising=False)
    assert [kind().replaced_hook() for kind in kinds] == [name] * 3


def test_a_method_that_was_removed(peer, monkeypatch):
    ours = type("Loss", (Hooked, peer.Loss), OF_OURS)
    monkeypatch.delattr(peer.Base, "step")
    assert ours().replaced_hook() == "step"


def test_methods_of_other_packages_and_values_are_no_hooks(peer, monkeypatch):
    exec("import torch\nclass Layer(torch.nn.Module):\n    scale = 1", vars(peer))
    ours = type("Layer", (Hooked, peer.Layer), {"scale": 2, "extra_repr": lambda self: "ours"})
    assert ours().replaced_hook() is None
    monkeypatch.setattr(torch.nn.Module, "extra_repr", lambda self: "patched")
    monkeypatch.setattr(peer.Layer, "scale", 3)
    assert ours().replaced_hook() is None


@pytest.mark.parametrize(("owner", "name"), PATCHES)
def test_methods_that_were_patched_before_ours_was_made(owner, name, peer, monkeypatch):
    monkeypatch.setattr(getattr(peer, owner), name, inspect.cleandoc, raising=False)
    ours = type("Loss", (Hooked, peer.Loss), OF_OURS)
    assert ours().replaced_hook() == name


def test_methods_of_theirs_below_another_loss_of_ours(peer, monkeypatch):
    """As their loss of angles is one of cosines."""
    exec("class Further(Loss): pass", vars(peer))
    ours = type("Loss", (Hooked, peer.Loss), OF_OURS)
    further = type("Further", (peer.Further, ours), {})
    assert further().replaced_hook() is None
    monkeypatch.setattr(peer.Base, "step", len)
    assert further().replaced_hook() == "step"


def test_modules():
    layer = torch.nn.CosineSimilarity(dim=-1)
    assert is_plain(copy.deepcopy(layer).eval(), layer)
    assert not is_plain(torch.nn.CosineSimilarity(dim=0), layer)
    assert not is_plain(torch.nn.Identity(), layer)
    assert not is_plain(type("Mine", (torch.nn.CosineSimilarity,), {})(dim=-1), layer)
    assert patched_attribute(layer) is None
    hooked = copy.deepcopy(layer)
    hooked.register_forward_hook(lambda *given: None)
    assert patched_attribute(hooked) == "forward_hooks"
    assert not is_plain(hooked, layer)
    hooked = copy.deepcopy(layer)
    hooked.forward = lambda x, y: x
    assert patched_attribute(hooked) == "forward"


@pytest.mark.parametrize("weight", [None, torch.ones(3)])
def test_a_weighted_cross_entropy(weight):
    plain = torch.nn.CrossEntropyLoss()
    assert is_plain(torch.nn.CrossEntropyLoss(weight=weight), plain) == (weight is None)


def test_functions_beside_the_class(monkeypatch):
    """Those that the module of their class defines; what it imports is not its own."""
    module = types.ModuleType("a_peer")
    exec("def helper(): pass\n\nclass Loss: pass", vars(module))
    module.imported = inspect.cleandoc
    monkeypatch.setitem(sys.modules, "a_peer", module)
    kind = type("Loss", (Hooked, module.Loss), {}, hooks=())
    assert kind().replaced_hook() is None
    monkeypatch.setattr(module, "imported", len)
    assert kind().replaced_hook() is None
    monkeypatch.setattr(module, "helper", len)
    assert kind().replaced_hook() == "helper"
    monkeypatch.delattr(module, "helper")
    assert kind().replaced_hook() == "helper"


def test_functions_beside_every_class_of_theirs(peer, monkeypatch):
    """Beside each that ours is made of, whether it names hooks or not; of a user's class none."""
    exec("def helper(): pass", vars(peer))
    other = types.ModuleType("another_peer")
    exec("def more(): pass\n\nclass Further: pass", vars(other))
    monkeypatch.setitem(sys.modules, "another_peer", other)
    ours = type("Loss", (Hooked, peer.Loss), OF_OURS)
    further = type("Further", (ours, other.Further), {})
    users = type("Mine", (type("Mine", (further,), {"__module__": __name__}),), {})
    assert {beside.__name__ for beside, _ in users._functions} == {"a_peer", "another_peer"}
    with monkeypatch.context() as patch:
        patch.setattr(peer, "helper", functools.wraps(peer.helper)(lambda: "patched"))
        again = type("Loss", (ours,), {})  # made after the patch, which passes for theirs
        assert stands_for(again) is peer.Loss
        kinds = ours, further, users, again
        assert [kind().replaced_hook() for kind in kinds] == ["helper"] * 4
    assert [kind().replaced_hook() for kind in (ours, further, users)] == [None] * 3
    monkeypatch.setattr(other, "more", len)
    assert [kind().replaced_hook() for kind in (ours, further, users)] == [None, "more", "more"]

"""Peers' losses against ours in their place; truth is their code in float64.

A package that is not installed is left out. Of packages that import torchvision and more, the
module of the losses is imported alone.
"""

import functools
import importlib
import importlib.util
import sys
import types

import pytest
import torch

from tests.measure import assert_close, conditioning
from tests.seeds import fresh

ROWS, WIDTH = 21, 12


def alone(monkeypatch, name, *empty):
    """The module `name`, its packages bare: no file of theirs runs but the ones that it imports.

    empty: modules that it imports and does not need.
    """
    root = name.partition(".")[0]
    if root not in sys.modules:
        found = importlib.util.find_spec(root)
        if found is None:
            pytest.skip(f"{root} is not installed")
        bare(monkeypatch, root, found.submodule_search_locations[0])
    path = sys.modules[root].__path__[0]
    parts = name.split(".")
    for depth in range(1, len(parts)):
        bare(monkeypatch, ".".join(parts[:depth]), "/".join([path, *parts[1:depth]]))
    for other in empty:
        monkeypatch.setitem(sys.modules, other, types.ModuleType(other))
    return importlib.import_module(name)


def bare(monkeypatch, name, path):
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = [path]
        monkeypatch.setitem(sys.modules, name, module)


def of(*shape, seed):
    return 1.5 * torch.randn(*shape, generator=fresh(seed))


def mixed(sides):
    """The same in two dtypes, and twice in float32: (given, plain)."""
    given = sides[0].bfloat16(), sides[1]
    return given, [side.float() for side in given]


def doubling(monkeypatch, owner, name):
    """A patch of a method, whose result is doubled."""
    shipped = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **options: 2 * shipped(*given, **options))


def compare(ours, theirs, tensors):
    """ours, theirs: functions of the tensors; value and gradients."""

    def results(call, tensors, dtype=torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        value = call(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    mine, dense = (results(call, tensors, torch.float32) for call in (ours, theirs))
    wide = [t.double() for t in tensors]
    moves = conditioning(functools.partial(results, theirs), wide)
    truth = results(theirs, wide)
    for index, (*parts, move) in enumerate(zip(mine, truth, dense, moves, strict=True)):
        moved = torch.finfo(torch.float32).eps * move
        assert_close(f"part {index}", *parts, torch.float32, moved=moved)

"""Peers' losses against ours in their place; truth is their code in float64.

A package that is not installed is left out. Of packages that import torchvision and more, the
module of the losses is imported alone.
"""

import importlib
import importlib.util
import sys
import types

import pytest
import torch

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

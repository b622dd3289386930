"""One operator call for a small batch against the passes: two implementations of one formula.

`whole` finishes in C++ (csrc/cpu/finish.h), the passes in fastsim/kinds and, for the full triplet,
in fastsim/losses/full_triplet.py. On random states of every kind both have to say the same.
"""

from dataclasses import replace

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.cpu import backend as cpu
from fastsim.engine.autograd import tile_loss
from fastsim.kinds import KINDS
from fastsim.pairs import Pairs, negative_counts
from fastsim.tile import Tile
from tests.measure import assert_close, conditioning
from tests.seeds import fresh

ROWS, COLUMNS, WIDTH = 13, 17, 6
TRIPLETS = tuple(name for name in cpu.WHOLE if not KINDS[name].in_panels)
TARGETED = ("softmax", "sigmoid", "squared_error")  # by any targets
SIDES = ("multi_similarity", "multi_positive", "circle")  # positives and negatives by groups
BOTH = {"margin": 0.3, "symmetric": True}


def combinations():
    """(kind, targets, whether pairs are left out, options) that a loss may ask for."""
    for kind in cpu.WHOLE:
        if kind == "softmax":
            for options in ({}, {"margin": 0.3}, {"symmetric": True}, BOTH):
                yield kind, "positives", False, options
                yield kind, "positives", True, options
        if kind == "multi_similarity":
            yield kind, "groups", False, {"positive_scale": 3.0, "base": 0.2}
        if kind == "circle":
            yield kind, "groups", False, {"margin": 0.3}
        if kind in SIDES:
            yield kind, "groups", False, {}
        if kind in ("decoupled", "debiased"):
            yield kind, "positives", True, {}
            yield kind, "positives", False, {}
        if kind in TARGETED:
            for targets in ("groups", "dense"):
                yield kind, targets, False, {}
        if kind == "softmax":
            yield kind, "groups", False, {"normalise": True}
            yield kind, "dense", False, {"normalise": True}


def pairs_of(targets, excluded, random):
    def integers(high, *shape):
        return torch.randint(high, shape, generator=random)

    ids = (integers(4, ROWS), integers(4, COLUMNS)) if excluded else (None, None)
    if targets == "positives":
        return Pairs(integers(COLUMNS, ROWS), *ids)
    if targets == "groups":  # a row of group 9 has no target where negatives have target 0
        groups = integers(3, ROWS).index_fill_(0, torch.tensor([2]), 9), integers(3, COLUMNS)
        return Pairs(row_groups=groups[0], column_groups=groups[1], negative_target=0.0)
    dense = torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64)
    return Pairs(dense=dense.index_fill_(0, torch.tensor([2]), 0.0))


def both(function, tensors, monkeypatch, kind):
    """[value and gradients] by the one call and by the passes, seen to be so."""
    calls = []
    whole = cpu.CpuBackend.whole

    def seen(self, tile, *arguments):
        calls.append(tile.kind)
        return whole(self, tile, *arguments)

    monkeypatch.setattr(cpu.CpuBackend, "whole", seen)
    one = function(tensors)
    assert calls == [kind]
    monkeypatch.setattr(cpu.CpuBackend, "serves_whole", lambda *_: False)
    passes = function(tensors)
    assert calls == [kind]
    return one, passes


def compare(function, tensors, monkeypatch, kind, size):
    one, passes = both(function, tensors, monkeypatch, kind)
    moved = conditioning(function, tensors)
    eps = torch.finfo(torch.float64).eps
    for place, (got, truth, move) in enumerate(zip(one, passes, moved, strict=True)):
        name = f"result {place}"
        assert_close(name, got, truth, truth, torch.float64, size=size, moved=eps * move)


@pytest.mark.parametrize(("kind", "targets", "excluded", "options"), [*combinations()], ids=str)
def test_finishes_as_the_record_does(kind, targets, excluded, options, monkeypatch, usable):
    usable("cpu")
    random = fresh(51)
    tensors = [
        torch.randn(n, WIDTH, generator=random, dtype=torch.float64) for n in (ROWS, COLUMNS)
    ]
    weights = torch.rand(ROWS, generator=random, dtype=torch.float64)
    pairs = pairs_of(targets, excluded, random)
    if kind == "debiased":  # whose sides are groups, the positive's that of one column
        counts = negative_counts(pairs, COLUMNS).double()
        priors = torch.rand(ROWS, generator=random, dtype=torch.float64) / 3
        options = {"prior": torch.stack([priors.index_fill_(0, torch.arange(4), 0.0), counts], 1)}
        pairs = replace(pairs, row_groups=pairs.positives, column_groups=torch.arange(COLUMNS))
    tile = Tile(kind, pairs, **options)
    scale = 10 ** (2 * torch.rand((), generator=random, dtype=torch.float64))  # 1 to 100

    def function(given):
        x, y, *scalars = (t.detach().requires_grad_() for t in given)
        learnt = dict(zip(("scale", "bias"), scalars, strict=True))
        wanted = [x, y, *(learnt[name] for name in KINDS[kind].learns)]
        scalars = {n: t if n in KINDS[kind].learns else t.item() for n, t in learnt.items()}
        loss = tile_loss(tile, x, y, **scalars, weights=weights, formula=None, backend=get("cpu"))
        return [loss.detach(), *torch.autograd.grad(loss, wanted)]

    bias = torch.tensor(-1.0, dtype=torch.float64)
    size = weights.sum().item() * scale.item() * COLUMNS
    compare(function, [*tensors, scale, bias], monkeypatch, kind, size)


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("kind", TRIPLETS)
def test_full_triplet_as_by_selection(kind, excluded, monkeypatch, usable):
    usable("cpu")
    random = fresh(52)
    tensors = [
        torch.randn(n, WIDTH, generator=random, dtype=torch.float64) for n in (ROWS, COLUMNS)
    ]
    ids = [torch.randint(4, (n,), generator=random) for n in (ROWS, COLUMNS)]

    def function(given):
        x, y = (t.detach().requires_grad_() for t in given)
        loss = fastsim.full_triplet(
            x,
            y,
            mining=kind.removesuffix("_triplet"),
            margin=0.4,
            exclude=tuple(ids) if excluded else None,
            backend="cpu",
        )
        return [loss.detach(), *torch.autograd.grad(loss, (x, y))]

    compare(function, tensors, monkeypatch, kind, size=1.0)


def test_every_kind_is_compared():
    assert {kind for kind, *_ in combinations()} | {*TRIPLETS} == {*cpu.WHOLE}


def test_a_library_of_other_constants_is_refused(monkeypatch, usable):
    usable("cpu")
    assert cpu._agrees()
    for name, value in {"EMPTY": -1e29, "TILE_ROWS": 13, "ALIGNED": 65}.items():
        with monkeypatch.context() as other:
            other.setattr(cpu, name, value)
            assert not cpu._agrees()

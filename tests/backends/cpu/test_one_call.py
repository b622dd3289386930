"""One operator call for a small batch against the passes: two implementations of one formula.

The one call finishes in C++ (csrc/cpu/finish.h), the passes in fastsim/kinds and, for the full
triplet, in fastsim/losses/full_triplet.py. On random states of every kind both have to agree.
"""

from dataclasses import replace

import pytest
import torch

import fastsim
from fastsim.backends import get
from fastsim.backends.cpu import library, one_call, sizes, workspace
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.backends.cpu.one_call import SERVED
from fastsim.engine import prepared
from fastsim.engine.autograd import tile_loss
from fastsim.kinds import KINDS
from fastsim.pairs import Factors, Guide, Pairs, negative_counts
from fastsim.tile_loss import TileLoss
from tests.measure import assert_close, conditioning
from tests.seeds import fresh

ROWS, COLUMNS, WIDTH = 13, 17, 6
TRIPLETS = tuple(name for name in SERVED if name.endswith("_triplet"))
TARGETED = ("softmax", "sigmoid", "squared_error")  # by any targets
SIDES = ("multi_similarity", "multi_positive", "circle")  # positives and negatives by groups
BOTH = {"margin": 0.3, "symmetric": True}
# What may be asked of pairs whatever the kind, by how `extended` makes it.
EXTRAS = ("dot", "guide", "relative guide", "above", "bias")
# (rows of a band, rows whose scores a symmetric loss keeps from its first pass to its second)
BANDS = {"one_band": (ROWS, ROWS), "bands": (5, 0)}
KEPT = {"some_kept": (5, 10), "all_kept": (5, ROWS)}


def combinations():
    """(kind, targets, whether pairs are left out, options) that a loss may ask for."""
    for kind in SERVED:
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
        if kind in ("softmax", "decoupled"):
            # The decoupled loss takes a row without negatives for one whose scores are all -inf.
            for extra in EXTRAS if kind == "softmax" else ("dot", "bias"):
                yield kind, "positives", True, {"extra": extra}
        if kind == "sigmoid":
            yield kind, "groups", False, {"extra": "positive_weights"}
            yield kind, "dense", False, {"extra": "dot"}
        if kind == "distillation":
            yield kind, "dense", False, {"positive_scale": 3.0}
            yield kind, "factors", False, {"positive_scale": 3.0}
        if kind == "squared_error":
            yield kind, "factors", False, {"extra": "row_shift"}
        if kind in TARGETED:
            for targets in ("groups", "dense"):
                yield kind, targets, False, {}
        if kind == "softmax":
            yield kind, "groups", False, {"normalise": True}
            yield kind, "dense", False, {"normalise": True}
            for extra in ("dot", "guide", "above"):
                yield kind, "positives", True, {"symmetric": True, "extra": extra}


def combinations_in_bands():
    for combination in combinations():
        *_, options = combination
        layouts = BANDS | KEPT if options.get("symmetric") else BANDS
        for name, layout in layouts.items():
            yield pytest.param(*combination, layout, id=f"{name}-{combination}")


def pairs_of(targets, excluded, random):
    def integers(high, *shape):
        return torch.randint(high, shape, generator=random)

    ids = (integers(4, ROWS), integers(4, COLUMNS)) if excluded else (None, None)
    if targets == "positives":
        return Pairs(integers(COLUMNS, ROWS), *ids)
    if targets == "groups":  # a row of group 9 has no target where negatives have target 0
        groups = integers(3, ROWS).index_fill_(0, torch.tensor([2]), 9), integers(3, COLUMNS)
        return Pairs(row_groups=groups[0], column_groups=groups[1], negative_target=0.0)
    if targets == "factors":
        return Pairs(factors=Factors(*normal(random, (ROWS, 5), (COLUMNS, 5))))
    dense = torch.randn(ROWS, COLUMNS, generator=random, dtype=torch.float64)
    return Pairs(dense=dense.index_fill_(0, torch.tensor([2]), 0.0))


def normal(random, *shapes):
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def extended(tile, extra, random):
    """The tile with one more of what may be asked of it."""
    pairs, of = tile.pairs, {}
    if extra in ("guide", "relative guide"):
        guide = normal(random, (ROWS, 5), (COLUMNS, 5))
        of = {"guide": Guide(*guide, None, margin=-0.1, relative=extra != "guide")}
    elif extra == "above":
        of = {"exclude_above": 0.2}
    elif extra == "bias":
        of = {"column_bias": normal(random, (COLUMNS,))[0]}
    elif extra == "row_shift":
        of = {"row_shift": normal(random, (ROWS,))[0]}
    elif extra == "positive_weights":
        return replace(tile, positive_weights=torch.rand(ROWS, generator=random).double())
    return replace(tile, pairs=replace(pairs, **of), cosine=extra != "dot")


def with_thresholds(tile):
    """The tile as the passes take it, which are given what a guide's cosines may not be above."""
    guide = tile.pairs.guide
    if guide is None:
        return tile
    columns = guide.columns[tile.pairs.positives]
    cosines = torch.nn.functional.cosine_similarity(guide.rows, columns)
    thresholds = cosines - (cosines.abs() if guide.relative else 1) * guide.margin
    return replace(tile, pairs=replace(tile.pairs, guide=replace(guide, thresholds=thresholds)))


def both(function, tensors, monkeypatch, kind):
    """[value and gradients] by the one call and by the passes, seen to be so."""
    calls = []
    original = CpuBackend.in_one_call

    def seen(self, tile, *arguments):
        calls.append(tile.kind)
        return original(self, tile, *arguments)

    monkeypatch.setattr(CpuBackend, "in_one_call", seen)
    one = function(tensors)
    assert calls == [kind]
    monkeypatch.setattr(CpuBackend, "serves_one_call", lambda *_: False)
    prepared.forget()
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


@pytest.mark.parametrize(
    ("kind", "targets", "excluded", "options", "layout"), [*combinations_in_bands()]
)
def test_finishes_as_the_record_does(kind, targets, excluded, options, layout, monkeypatch, usable):
    usable("cpu")
    tall, kept = layout
    monkeypatch.setattr(one_call, "band_rows", lambda *_: tall)
    monkeypatch.setattr(one_call, "rows_kept", lambda *_: kept)
    random = fresh(51)
    tensors = [
        torch.randn(n, WIDTH, generator=random, dtype=torch.float64) for n in (ROWS, COLUMNS)
    ]
    weights = torch.rand(ROWS, generator=random, dtype=torch.float64)
    pairs = pairs_of(targets, excluded, random)
    if kind == "debiased":  # whose sides are groups, the positive's that of one column
        counts = negative_counts(pairs, COLUMNS, get("cpu")).double()
        priors = torch.rand(ROWS, generator=random, dtype=torch.float64) / 3
        options = {"prior": torch.stack([priors.index_fill_(0, torch.arange(4), 0.0), counts], 1)}
        pairs = replace(pairs, row_groups=pairs.positives, column_groups=torch.arange(COLUMNS))
    options, extra = dict(options), options.get("extra")
    options.pop("extra", None)
    tile = extended(TileLoss(kind, pairs, **options), extra, random)
    scale = 10 ** (2 * torch.rand((), generator=random, dtype=torch.float64))  # 1 to 100

    def function(given):
        x, y, *scalars = (t.detach().requires_grad_() for t in given)
        learnt = dict(zip(("scale", "bias"), scalars, strict=True))
        wanted = [x, y, *(learnt[name] for name in KINDS[kind].learns)]
        scalars = {n: t if n in KINDS[kind].learns else t.item() for n, t in learnt.items()}
        taken = get("cpu").serves_one_call(tile, ROWS, COLUMNS, WIDTH, False, tensors[0].dtype)
        given = {"weights": weights, "formula": None, "backend": get("cpu")}
        loss = tile_loss(tile if taken else with_thresholds(tile), x, y, **scalars, **given)
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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("given", ["embeddings", "scores"])
def test_margins_as_by_a_squared_error(given, reduction, monkeypatch, usable):
    usable("cpu")
    random = fresh(54)
    tensors = normal(random, (ROWS, WIDTH), (COLUMNS, WIDTH))
    teacher = normal(random, (ROWS, 5), (COLUMNS, 5))
    if given == "scores":
        teacher = normal(random, (ROWS, COLUMNS))

    def function(sides):
        x, y = (t.detach().requires_grad_() for t in sides)
        options = {"kind": "margin_mse", "temperature": 0.7, "teacher_temperature": 1.9}
        loss = fastsim.distill(x, y, *teacher, **options, reduction=reduction, backend="cpu")
        return [loss.detach(), *torch.autograd.grad(loss, (x, y))]

    compare(function, tensors, monkeypatch, "margins", size=ROWS)


@pytest.mark.parametrize("kind", SERVED)
def test_pairs_without_targets_are_an_error(kind, usable):
    """Rather than a read of what is not there."""
    usable("cpu")
    index = torch.arange(ROWS)
    pairs = Pairs(index)
    if kind in ("softmax", "decoupled", "margins", *TRIPLETS):
        pairs = Pairs(row_groups=index, column_groups=index)
    tile = TileLoss(kind, pairs, symmetric=kind == "softmax")
    x = torch.randn(ROWS, WIDTH, generator=fresh(53))
    with pytest.raises(RuntimeError, match="wanted"):
        get("cpu").in_one_call(tile, x, x, 1.0, 0.0, 1.0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tall", "width"), [(5, 129), (64, 250), (13, 16), (13, 64)])
@pytest.mark.parametrize("most", [workspace.CACHED, 4 * sizes.BAND], ids=["cached", "unit rows"])
def test_many_columns_as_they_are(most, tall, width, dtype, monkeypatch, usable):
    """Columns of the compute type are multiplied by their inverse norms while they are packed for
    each band, if their rows or their columns are contiguous. Of others unit rows are made, and of
    all with AVX-512 if these take little memory."""
    usable("cpu")
    monkeypatch.setattr(one_call, "band_rows", lambda *_: tall)
    monkeypatch.setattr(one_call, "parts_serve_loss", lambda *_: False)
    monkeypatch.setattr(one_call, "blas_is_faster", lambda *_: False)
    monkeypatch.setattr(one_call, "parts_are_faster", lambda *_: False)
    # Beyond kCached or kMostUnitRows in csrc/cpu/panel.h.
    rows, columns = 2 * tall + 3, most // (width * dtype.itemsize) + 101
    monkeypatch.setattr(one_call, "WIDEST", columns)
    x, y = (torch.randn(n, width, generator=fresh(54), dtype=dtype) for n in (rows, columns))
    y *= 10 ** torch.empty(columns, 1, dtype=dtype).uniform_(-20, 18, generator=fresh(55))
    y[columns // 2] = 0
    y[columns - 1] = torch.finfo(dtype).tiny / 2  # a norm at which squares underflow
    positives = torch.randint(columns, (rows,), generator=fresh(56))

    def results(columns):
        x_leaf, y_leaf = x.clone().requires_grad_(), columns.detach().requires_grad_()
        scale = torch.tensor(0.07, dtype=dtype, requires_grad=True)
        loss = fastsim.info_nce(x_leaf, y_leaf, positives, temperature=scale)
        return [loss.detach(), *torch.autograd.grad(loss, (x_leaf, y_leaf, scale))]

    of_unit_rows = results(y.repeat_interleave(2, dim=1)[:, ::2])
    rows_apart = torch.cat([y, y[:, :1]], 1)[:, :width]
    by_columns = torch.cat([y, y[:1]]).t().contiguous().t()[:columns]
    for lazy in (y, rows_apart, by_columns):
        for result, expected in zip(results(lazy), of_unit_rows, strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("excluded", [False, True])
def test_gradients_of_rows_with_themselves_in_bands(excluded, monkeypatch, usable):
    """Both shares of the gradient of each row."""
    usable("cpu")
    random = fresh(55)
    monkeypatch.setattr(one_call, "band_rows", lambda *_: 5)
    x = torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)
    groups = torch.randint(3, (ROWS,), generator=random)
    ids = torch.randint(4, (ROWS,), generator=random) if excluded else None
    pairs = Pairs(None, ids, ids, groups, groups, skip="diagonal", negative_target=0.0)
    weights = torch.rand(ROWS, generator=random, dtype=torch.float64)

    def function(given):
        rows = given[0].detach().requires_grad_()
        options = {"weights": weights, "formula": None, "backend": get("cpu")}
        loss = tile_loss(TileLoss("softmax", pairs), rows, rows, scale=7.0, bias=0.0, **options)
        return [loss.detach(), *torch.autograd.grad(loss, rows)]

    compare(function, [x], monkeypatch, "softmax", size=7 * ROWS)


def test_every_kind_is_compared():
    assert {kind for kind, *_ in combinations()} | {*TRIPLETS, "margins"} == {*SERVED}


def test_a_library_of_other_constants_is_refused(monkeypatch, usable):
    usable("cpu")
    assert library.agrees()
    others = {"EMPTY": -1e29, "TILE_ROWS": 13, "ALIGNED": 65, "_INTERFACE": 1}
    for name, value in others.items():
        with monkeypatch.context() as other:
            other.setattr(library, name, value)
            assert not library.agrees()

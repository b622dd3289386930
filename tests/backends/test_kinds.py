"""Every kind of loss in every backend: served, or refused in a sentence."""

import re
from dataclasses import replace

import pytest
import torch

import fastsim
from fastsim.backends import base, get, pick
from fastsim.backends.extras import EXTRAS
from fastsim.engine.autograd import tile_loss
from fastsim.kinds import KINDS, LATE_INTERACTION, SELECTIONS
from fastsim.kinds.kind import COLUMNS, MATRIX, ROWS, Kind
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss
from tests.cases import CASES
from tests.seeds import fresh

BACKENDS = tuple(fastsim.backends())
NAMES = (*KINDS, *SELECTIONS, *LATE_INTERACTION)
IN_PANELS = [name for name, kind in KINDS.items() if kind.in_panels]


def grouped(rows, columns, kind=None):
    """Pairs by groups, or of a kind that has one positive a row, by positives."""
    if kind == "decoupled":
        return Pairs(torch.arange(rows))
    return Pairs(row_groups=torch.arange(rows) % 3, column_groups=torch.arange(columns) % 3)


def is_a_sentence(reason):
    return isinstance(reason, str) and len(reason.split()) > 3


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", NAMES)
def test_served_or_refused(kind, name, usable):
    backend, x = get(name), torch.randn(5, 4)
    reason = backend.unsupported_reason(x, kind=kind)
    if reason is not None:
        assert is_a_sentence(reason)
        with pytest.raises(RuntimeError) as error:
            pick(name, x, kind=kind)
        assert reason in str(error.value)
        return
    assert pick(name, x, kind=kind) is backend
    if name == "eager":
        return  # the losses' own formulas
    y = torch.randn(7, 4)
    if kind in LATE_INTERACTION:
        tokens = torch.randn(2, 3, 4), torch.randn(5, 2, 4)
        assert fastsim.max_sim(*tokens, backend=name).isfinite().all()
        return
    if kind in SELECTIONS:
        pairs = Pairs(torch.arange(5)) if kind == "closest" else grouped(5, 7)
        extra = (False,) if kind == "closest" else (None,)
        found = getattr(backend, kind)(pairs, *extra, backend.operand(x, x.dtype), y)
        assert len(found) == (5 if kind == "closest" else 2)
        return
    levels = torch.tensor([-1.0, 1.0]) if kind == "levels" else None
    weights = None if KINDS[kind].whole_matrix else torch.rand(5)
    x.requires_grad_()
    tile = TileLoss(kind, grouped(5, 7, kind), levels=levels)
    loss = tile_loss(tile, x, y, scale=3.0, weights=weights, formula=None, backend=backend)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert (x.grad != 0).any()


@pytest.mark.parametrize("name", BACKENDS)
def test_an_unknown_kind_is_refused(name):
    assert is_a_sentence(get(name).unsupported_reason(kind="odd"))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_knows_its_kinds(name):
    reason = get(name).unsupported_kind("odd")
    assert is_a_sentence(reason)
    assert "'odd'" in reason
    assert {*get(name).kinds()} <= {*NAMES}


def test_auto_goes_on_to_the_next(monkeypatch, usable):
    usable("cpu")
    x = torch.randn(5, 4)
    first = pick(None, x, kind="softmax")
    monkeypatch.setattr(type(first), "kinds", lambda self: {*NAMES} - {"softmax"})
    assert pick(None, x, kind="softmax") is not first
    assert pick(None, x, kind="sigmoid") is first
    with pytest.raises(RuntimeError, match=r"no backend can be used .*'odd'"):
        pick(None, x, kind="odd")


# ---- the records ----


def a_tile(kind, **options):
    pairs = options.pop("pairs", grouped(5, 7, kind))
    return TileLoss(kind, pairs, torch.tensor(3.0), levels=torch.tensor([-1.0, 1.0]), **options)


TILES = {
    **{kind: a_tile(kind) for kind in IN_PANELS},
    "softmax positives": a_tile("softmax", pairs=Pairs(torch.arange(5))),
    "softmax symmetric": a_tile("softmax", pairs=Pairs(torch.arange(5)), symmetric=True),
    "log-sum-exps": a_tile("softmax", pairs=Pairs(), symmetric=True),
    "multi_similarity options": a_tile("multi_similarity", positive_scale=2.0, base=0.5),
}


@pytest.fixture(params=TILES)
def tile(request):
    return TILES[request.param]


def state_of(tile, columns):
    """(the tile, its state, unit rows) of a slice of the columns, in float64."""
    generator = fresh(5)
    x, y = (
        torch.nn.functional.normalize(torch.randn(n, 4, generator=generator, dtype=torch.float64))
        for n in (5, 7)
    )
    levels = None if tile.levels is None else tile.levels.double()
    pairs = tile.pairs.of_columns(columns)
    tile = replace(tile, pairs=pairs, levels=levels, scale=3.0)
    return tile, get("cpu").forward(tile, x, y[columns]), x, y[columns]


def test_state_has_the_shapes_of_its_parts(tile, usable):
    usable("cpu")
    of_all, state, _, _ = state_of(tile, slice(0, 7))
    assert [part.shape for part in state] == of_all.state_shapes(5, 7)
    assert all(part.dtype == torch.float64 for part in state)


def test_states_merge(tile, usable):
    """Those of two slices of columns into that of all; terms of whole rows need both first."""
    usable("cpu")
    (of_all, whole, *_), (_, one, *_), (_, two, *_) = (
        state_of(tile, columns) for columns in (slice(0, 7), slice(0, 5), slice(5, 7))
    )
    parts = [part for part in of_all.parts if part.axis != COLUMNS and not part.needs_row]
    merged = of_all.merge(parts, one, two)
    for part, wanted in zip(merged, whole, strict=False):
        torch.testing.assert_close(part, wanted, rtol=1e-12, atol=0)
    assert len(merged) == sum(part.size for part in parts)


def test_coefficients_have_the_sizes_of_their_axes(tile, usable):
    usable("cpu")
    of_all, state, _, _ = state_of(tile, slice(0, 7))
    grad = torch.rand(of_all.loss_shape(5, 7), dtype=torch.float64)
    sizes = {ROWS: (5,), COLUMNS: (7,), MATRIX: (2,)}
    found = of_all.coefficients(state, grad)
    for coefficient, axis in zip(found, of_all.record.coefficient_axes, strict=True):
        assert coefficient is None or coefficient.shape == sizes[axis]
    block = slice(1, 3), slice(2, 7)
    sizes = {ROWS: (2,), COLUMNS: (5,), MATRIX: (2,)}
    of_block = of_all.coefficients_of_block(found, block)
    for coefficient, axis in zip(of_block, of_all.record.coefficient_axes, strict=True):
        assert coefficient is None or coefficient.shape == sizes[axis]


def test_score_gradients_are_bounded(tile, usable):
    """By the record's bound, from which the loss scale of 16-bit score gradients follows."""
    usable("cpu")
    backend = get("cpu")
    of_all, state, x, y = state_of(tile, slice(0, 7))
    grad = 1 + torch.rand(of_all.loss_shape(5, 7), dtype=torch.float64)
    coefficients = of_all.coefficients(state, grad)
    everything = slice(0, 5), slice(0, 7)
    workspace = backend.workspace(x, y)
    panel = backend.score_grad(of_all, x, y, everything, coefficients, workspace)
    bound = of_all.record.largest_score_grad(tile, grad, 7)
    assert 0 < panel.abs().max() <= bound


def test_every_record_stands_under_its_name():
    for name, kind in KINDS.items():
        assert kind.name == name
        assert isinstance(kind, Kind)
        assert type(kind).__doc__
        assert set(kind.learns) <= {"scale", "bias"}
        assert {*kind.parameters} <= {*vars(TileLoss("softmax", Pairs()))}


def test_the_base_class_promises_nothing():
    with pytest.raises(NotImplementedError):
        base.Backend().kinds()


@pytest.mark.parametrize("name", ["triton", "cuda"])
@pytest.mark.parametrize("case", [c for c in CASES if c.extras], ids=repr)
def test_what_kernels_lack_is_refused_in_a_sentence(case, name):
    lacking = [extra for extra in case.extras if extra not in get(name).extras]
    if not lacking:
        return
    tensors, others, options = case.make(4, 5, 6, fresh(1))
    with pytest.raises(RuntimeError, match=re.escape(EXTRAS[lacking[0]])):
        case.loss(*tensors, *others, **options, backend=name)

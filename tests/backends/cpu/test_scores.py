"""Panels of scores from columns as they came: the bits of packed columns, of unit rows."""

import pytest
import torch

from fastsim.backends import get
from fastsim.backends.cpu import amx, workspace
from fastsim.backends.cpu.lazy_rows import BAND, LazyUnitRows
from fastsim.backends.cpu.sizes import PAIRED
from fastsim.backends.cpu.workspace import PACK_AGAIN, Columns, Workspace
from tests.allocations import allocations
from tests.seeds import fresh

SIZES = ((7, 5, 3), (30, 64, 16), (19, 1023, 33), (37, 1301, 70))  # few and many column panels


def rows_of(*shape, dtype, seed):
    rows = torch.randn(shape, generator=fresh(seed), dtype=torch.float64).to(dtype)
    rows[len(rows) // 2] = 0.0
    return rows


@pytest.fixture(autouse=True)
def without_matrix_unit(usable, monkeypatch):
    usable("cpu")
    monkeypatch.setattr(amx, "parts", lambda dtype: 0)


def scores(columns, x, first, before):
    """A poisoned panel filled, and one of given numbers added to."""
    filled, added = torch.full_like(before, torch.nan), before.clone()
    columns.fill(filled, x, first)
    columns.fill(added, x, first, add=True)
    return filled, added


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_columns_packed_as_they_are_multiplied(size, dtype, monkeypatch):
    rows, columns, width = size
    x, y = (rows_of(count, width, dtype=dtype, seed=count) for count in (rows, columns))
    kept, again = (Workspace(y, tall, columns).columns for tall in (1, PACK_AGAIN))
    assert kept.packed is not None
    assert again.packed is None
    monkeypatch.setattr(workspace, "CACHED", y.numel() * y.element_size() - 1)
    assert Workspace(y, 1, columns).columns.packed is None
    for first in {0, columns // 128 * 64}:
        before = rows_of(rows, columns - first, dtype=dtype, seed=3)
        of_kept, of_again = (scores(one, x, first, before) for one in (kept, again))
        assert all(map(torch.equal, of_again, of_kept))
        truth = x.double() @ y[first:].double().T
        # A sum of `width` products, each of which is rounded.
        bound = width * torch.finfo(dtype).eps * (x.abs().double() @ y[first:].abs().double().T)
        assert ((of_again[0].double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_rows_made_unit_as_they_are_multiplied(size, dtype):
    rows, columns, width = size
    x, y = (3 * rows_of(count, width, dtype=dtype, seed=count) for count in (rows, columns))
    backend = get("cpu")
    unit_x, unit_y = (backend.unit_rows(side)[0] for side in (x, y))
    lazy_x, lazy_y = (backend.scored_rows(side) for side in (x, y))
    made, lazy = Columns(unit_y, repack=False), Columns(lazy_y, repack=False)
    for part in (slice(0, rows), slice(rows // 3, rows // 2 + 1)):
        panels = unit_x[part], lazy_x[part]
        assert torch.equal(*panels)
        for first in {0, columns // 128 * 64}:
            before = rows_of(len(panels[0]), columns - first, dtype=unit_x.dtype, seed=5)
            of_made, of_lazy = (
                scores(one, given, first, before)
                for one, given in zip((made, lazy), panels, strict=True)
            )
            assert all(map(torch.equal, of_lazy, of_made))


def test_more_rows_than_a_band(usable):
    x = rows_of(2 * BAND + 3, 5, dtype=torch.float32, seed=1)
    unit, inverse = get("cpu").unit_rows(x)
    lazy = LazyUnitRows(x)
    assert torch.equal(lazy[:], unit)
    assert torch.equal(lazy[BAND - 2 : BAND + 7], unit[BAND - 2 : BAND + 7])
    assert torch.equal(lazy.inverse, inverse)


def test_columns_that_are_transposed_or_spread():
    """A guide may be any view; its rows are read where they lie."""
    wide = rows_of(40, 2200, dtype=torch.float32, seed=2)
    for view in (wide.T, wide.T[::2], wide[:, ::2]):
        unit = get("cpu").unit_rows(view)[0]
        lazy = LazyUnitRows(view)
        panels = [torch.full((3, len(view)), torch.nan) for _ in range(2)]
        for rows, panel in zip((unit, lazy), panels, strict=True):
            Workspace(rows, 3, len(view)).fill(panel, rows, slice(1, 4), 0)
        assert torch.equal(*panels)


@pytest.mark.parametrize("made", [True, False], ids=["made where read", "unit rows"])
def test_paired_scores_take_memory_once(made):
    """As often for many blocks as for one, not for every block."""
    backend = get("cpu")

    def taken(rows):
        x, y = (rows_of(rows, 24, dtype=torch.float32, seed=seed) for seed in (1, 2))
        prepare = backend.scored_rows if made else lambda side: backend.unit_rows(side)[0]
        x, y = prepare(x), prepare(y)
        return allocations(lambda: backend.paired_scores(x, y))

    assert 0 < taken(PAIRED + 1) == taken(7 * PAIRED + 3)

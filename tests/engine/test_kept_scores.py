"""Losses of two passes: scores kept between the passes spare a product and
change nothing.
"""

import pytest
import torch

import fastsim
from fastsim.backends.cpu import sizes
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.backends.cpu.workspace import Workspace
from fastsim.engine.one_call import in_panels
from tests.cases import CASES, call, inputs
from tests.losses.test_losses import compare

SHAPE = (26, 29, 18)
BANDS = {0: 0, 11: 0, 12: 1, 25: 2, 26: 3}  # rows that may be kept: blocks of 12 that are


def looks_at_columns(case):
    _, _, options = inputs(case, SHAPE, torch.float32, seed=0)
    return case.loss is fastsim.cosent_matrix or options.get("symmetric", False)


TWICE = [case for case in CASES if case.tile and looks_at_columns(case)]


def keep(monkeypatch, case, rows):
    tensors, _, _ = inputs(case, SHAPE, torch.float32, seed=0)
    columns = SHAPE[0] if tensors[1] is None else SHAPE[1]
    monkeypatch.setattr(sizes, "KEPT", rows * columns)


@pytest.mark.parametrize("rows", BANDS)
@pytest.mark.parametrize("case", TWICE, ids=repr)
def test_equals_the_oracle(case, rows, small_panels, monkeypatch, usable):
    usable("cpu")
    keep(monkeypatch, case, rows)
    for dtype in (torch.float32, torch.float64):
        compare(case, "cpu", dtype, SHAPE, seed=rows)


def run(case, given, kept, monkeypatch):
    keep(monkeypatch, case, kept)
    tensors, others, options = given
    value, grads = call(case.loss, tensors, others, options | {"backend": "cpu"})
    return [value, *grads]


@pytest.mark.parametrize("case", TWICE, ids=repr)
def test_changes_nothing(case, small_panels, monkeypatch, usable):
    """In one call, if it serves the loss."""
    usable("cpu")
    given = inputs(case, SHAPE, torch.float32, seed=30)
    wanted = run(case, given, 0, monkeypatch)
    for rows in BANDS:
        results = run(case, given, rows, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("rows", BANDS)
@pytest.mark.parametrize("case", TWICE, ids=repr)
def test_panels_spare_products_and_change_nothing(case, rows, small_panels, monkeypatch, usable):
    usable("cpu")
    given = inputs(case, SHAPE, torch.float32, seed=31)
    scores = CpuBackend.scores
    products = 0

    def counted(*arguments, **keywords):
        nonlocal products
        products += 1
        return scores(*arguments, **keywords)

    monkeypatch.setattr(CpuBackend, "scores", counted)

    with in_panels():
        results = run(case, given, rows, monkeypatch)
        made = products
        wanted = run(case, given, 0, monkeypatch)
    of_a_band = 2 if "guide" in given[2] else 1  # the scores of the guide are spared with it
    assert products - 2 * made == BANDS[rows] * of_a_band
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("case", TWICE, ids=repr)
def test_nothing_is_kept_without_a_gradient(case, small_panels, monkeypatch, usable):
    usable("cpu")
    tensors, others, options = inputs(case, SHAPE, torch.float32, seed=32)
    kept = []
    keep_panel = Workspace.keep

    def recorded(workspace, block, panel):
        keep_panel(workspace, block, panel)
        kept.append(workspace.kept(block) is not None)

    monkeypatch.setattr(Workspace, "keep", recorded)
    with in_panels():
        case.loss(*tensors, *others, **options, backend="cpu")
        assert kept == [False] * 3
        kept.clear()
        call(case.loss, tensors, others, options | {"backend": "cpu"})
        assert kept == [True] * 3

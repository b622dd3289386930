"""A large batch on a GPU takes hardly more operations than a small one.

There an operation on few numbers takes no longer than its launch. Counted on tensors of the `meta`
device, whose panels are those of a small GPU.
"""

import contextlib

import pytest
import torch

import fastsim
from bench.host_time import calls_of
from fastsim.engine.one_call import in_panels
from fastsim.losses.further_candidates import DIRECTIONS
from tests import cases
from tests.cases import CASES, on_backend
from tests.test_no_waiting import prepared, run

SMALL, LARGE = (24, 27, 768), (1100, 1300, 768)
# Every token of a query has a row of D numbers for each document, N M times as many as a batch has.
MANY_TOKENS = (110, 130, 48)
TOKENS = (5,), (4, 7)  # of a query; of its documents
# Plain torch computes these for a small batch, with still fewer operations (below).
BY_FORMULA = {"info_nce-smooth", "info_nce-directions", "info_nce-directions-bias"}


def calls(case, shape):
    tensors, others, options = prepared(case, torch.float32, shape)
    options |= on_backend(case, "torch")
    run(case.loss, tensors, others, options)
    return calls_of(lambda: run(case.loss, tensors, others, options))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_of_every_loss(case, monkeypatch):
    monkeypatch.setattr(cases, "are_clear", lambda *_: True)  # values are lost on this device
    large = MANY_TOKENS if case.loss is fastsim.late_interaction else LARGE
    with in_panels() if case.name in BY_FORMULA else contextlib.nullcontext():
        few = calls(case, SMALL)
    many = calls(case, large)
    assert many <= 1.5 * few


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
@pytest.mark.parametrize("name", ["info_nce", "symmetric", "siglip", "full_triplet"])
def test_of_one_matrix(name, monkeypatch):
    """With the panels of a GPU of 16 GB the same number for 4,096 rows as for few."""
    monkeypatch.setenv("FASTSIM_PANEL_MB", "256")
    loss = fastsim.info_nce if name == "symmetric" else getattr(fastsim, name)
    options = {"symmetric": True} if name == "symmetric" else {}

    def step(rows):
        x, y = (torch.empty(rows, 8, device="meta", requires_grad=True) for _ in "xy")
        loss(x, y, **options, backend="torch").backward()

    for rows in (64, 4096):
        step(rows)
    assert calls_of(lambda: step(4096)) == calls_of(lambda: step(64))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
def test_of_documents_of_each_query():
    def step(queries):
        tokens = (torch.empty(queries, *n, 8, device="meta", requires_grad=True) for n in TOKENS)
        scores = torch.empty(queries, TOKENS[1][0], device="meta")
        fastsim.late_interaction_distillation(*tokens, scores, backend="torch").backward()

    step(2)
    assert calls_of(lambda: step(200)) == calls_of(lambda: step(2))


FURTHER = {
    "smoothed": {"label_smoothing": 0.1},
    "directions": {"directions": DIRECTIONS},
    "references": {"references": torch.empty(8, 6, device="meta")},
}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.10
@pytest.mark.parametrize("name", FURTHER)
def test_further_candidates_of_a_small_batch(name):
    """Plain torch over all scores takes at most four fifths of the operations of the passes."""
    x, y = (torch.empty(7, 6, device="meta", requires_grad=True) for _ in range(2))

    def step():
        fastsim.info_nce(x, y, **FURTHER[name], backend="torch").backward()

    step()
    few = calls_of(step)
    with in_panels():
        step()
        assert 5 * few <= 4 * calls_of(step)

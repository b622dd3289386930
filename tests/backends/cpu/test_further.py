"""Further candidates and label smoothing of a small batch: one call against a part at a time.

What the one operator (csrc/cpu/further.cpp) makes side by side, the engine makes of a log-sum-exp
of each part (fastsim/losses/further_candidates.py).
"""

import pytest
import torch

import fastsim
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.backends.cpu.sizes import scores_of_a_panel
from fastsim.engine import prepared
from tests.measure import assert_close, conditioning
from tests.seeds import fresh
from tests.threads import assert_same_bits

ROWS, COLUMNS, REFERENCES, WIDTH = 13, 17, 70, 6
WAYS = ("query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS = {
    **{way: {"directions": ("query_to_doc", way)} for way in WAYS},
    "own": {"own": True},
    "references": {"references": True, "margin": 0.2},
    "all": {"directions": ("query_to_doc", *WAYS), "own": True, "references": True, "margin": 0.2},
    "smoothed": {"label_smoothing": 0.3},
}


def normal(random, *shape):
    return torch.randn(shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", OPTIONS)
def test_in_one_call_as_by_parts(name, similarity, reduction, monkeypatch, usable):
    usable("cpu")
    random, options = fresh(81), dict(OPTIONS[name])
    tensors = [normal(random, ROWS, WIDTH), normal(random, COLUMNS, WIDTH)]
    if options.pop("own", False):
        tensors.append(normal(random, ROWS, 3, WIDTH))
    if options.pop("references", False):
        options["references"] = normal(random, REFERENCES, WIDTH)
    options |= {"similarity": similarity, "reduction": reduction, "temperature": 0.3}
    above = torch.rand(ROWS, generator=random).double() if reduction == "none" else None

    def function(given):
        x, y, *own = (t.detach().requires_grad_() for t in given)
        more = {"own_negatives": own[0]} if own else {}
        loss = fastsim.info_nce(x, y, **options, **more, backend="cpu")
        return [loss.detach(), *torch.autograd.grad(loss, (x, y, *own), above)]

    calls = []
    further = CpuBackend.further
    monkeypatch.setattr(CpuBackend, "further", lambda *given: calls.append(name) or further(*given))
    one = function(tensors)
    assert calls
    count = len(calls)
    monkeypatch.setattr(CpuBackend, "serves_further", lambda *_: False)
    prepared.forget()
    parts = function(tensors)
    assert len(calls) == count
    moved = conditioning(function, tensors)
    eps = torch.finfo(torch.float64).eps
    for place, (got, truth, move) in enumerate(zip(one, parts, moved, strict=True)):
        given = {"size": ROWS / 0.3, "moved": eps * move}
        assert_close(f"result {place}", got, truth, truth, torch.float64, **given)


@pytest.mark.parametrize("rows", [1, 64, 1030])
def test_two_threads_give_the_bits_of_one(rows, usable):
    usable("cpu")
    random = fresh(82)
    x, y, own = (normal(random, rows, *s).float() for s in ((40,), (40,), (2, 40)))
    sides = [side.requires_grad_() for side in (x, y, own)]

    def results():
        directions = ("query_to_doc", *WAYS)
        loss = fastsim.info_nce(x, y, own_negatives=own, directions=directions, backend="cpu")
        return [loss.detach(), *torch.autograd.grad(loss, sides)]

    assert_same_bits(results, (1, 2))


def test_as_many_scores_as_two_panels_hold(usable):
    """Of all parts together; more are made a part at a time."""
    usable("cpu")
    serves, most = CpuBackend().serves_further, 2 * scores_of_a_panel()
    assert serves(2048, most // 2048, 4, torch.float32)
    assert not serves(2048, most // 2048 + 1, 4, torch.float32)

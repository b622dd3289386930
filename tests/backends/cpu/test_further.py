"""Further candidates and label smoothing in one call against a part at a time.

What the one operator (csrc/cpu/further.cpp) makes side by side, the engine makes of a log-sum-exp
of each part (fastsim/losses/further_candidates.py).
"""

import pytest
import torch

import fastsim
from fastsim.backends.cpu import further, sizes
from fastsim.backends.cpu.backend import CpuBackend
from fastsim.engine import prepared
from fastsim.engine.one_call import in_panels
from tests.measure import assert_close, conditioning
from tests.seeds import fresh
from tests.threads import assert_same_bits

ROWS, REFERENCES, WIDTH = 13, 70, 6
WAYS = ("query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS = {
    **{way: {"directions": ("query_to_doc", way)} for way in WAYS},
    "own": {"own": True},
    "references": {"references": True, "margin": 0.2},
    "all": {"directions": ("query_to_doc", *WAYS), "own": True, "references": True, "margin": 0.2},
    "own and references": {"own": True, "references": True},
    "smoothed": {"label_smoothing": 0.3},
    "positives": {"own": True, "positives": True, "margin": 0.2},
    "excluded": {"own": True, "references": True, "exclude": True},
    "excluded above": {"own": True, "exclude_above": 0.1},
    "biased": {"references": True, "candidate_bias": True},
    "guided": {"own": True, "references": True, "guide": True, "guide_margin": 0.1},
    "smoothed and biased": {"label_smoothing": 0.3, "candidate_bias": True, "positives": True},
}
IN_BANDS = [name for name, options in OPTIONS.items() if "directions" not in options]


def normal(random, *shape):
    return torch.randn(shape, generator=random, dtype=torch.float64)


def made(name, random, rows, columns, width=WIDTH, references=REFERENCES):
    """(x, y and own negatives if the loss has any; its options)."""
    options = dict(OPTIONS[name])
    sides = [normal(random, rows, width), normal(random, columns, width)]
    if options.pop("own", False):
        sides.append(normal(random, rows, 3, width))
    tensors = {
        "references": lambda: normal(random, references, width),
        "positives": lambda: torch.randint(columns, (rows,), generator=random),
        # Among the ids are those that no row has, and the smallest numbers.
        "exclude": lambda: [torch.randint(5, (n,), generator=random) for n in (rows, columns)],
        "candidate_bias": lambda: normal(random, columns),
        "guide": lambda: (normal(random, rows, 4), normal(random, columns, 4)),
    }
    return sides, {name: tensors.get(name, lambda v=value: v)() for name, value in options.items()}


def info_nce(sides, **options):
    """The loss of what `made` makes."""
    more = {"own_negatives": sides[2]} if len(sides) > 2 else {}
    return fastsim.info_nce(*sides[:2], **options, **more, backend="cpu")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", OPTIONS)
def test_in_one_call_as_by_parts(name, similarity, reduction, monkeypatch, usable):
    usable("cpu")
    check_against_parts(name, ROWS, similarity, reduction, monkeypatch)


@pytest.mark.parametrize("name", ["own and references", "all", "smoothed"])
def test_only_the_temperature_is_learnt(name, monkeypatch, usable):
    usable("cpu")
    check_against_parts(name, ROWS, "cosine", "mean", monkeypatch, only_temperature=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", IN_BANDS)
def test_in_bands_as_by_parts(name, similarity, reduction, monkeypatch, usable, small_panels):
    usable("cpu")
    rows = 3 * sizes.band_rows(43, 43 + 4) + 7
    check_against_parts(name, rows, similarity, reduction, monkeypatch)


def check_against_parts(name, rows, similarity, reduction, monkeypatch, *, only_temperature=False):
    """The loss and the gradients of one call, against those of a log-sum-exp of each part."""
    random = fresh(81)
    tensors, options = made(name, random, rows, rows + 4)
    tensors.append(torch.tensor(0.3, dtype=torch.float64))
    options |= {"similarity": similarity, "reduction": reduction}
    above = torch.rand(rows, generator=random).double() if reduction == "none" else None

    def function(given):
        *sides, temperature = (t.detach().requires_grad_() for t in given)
        learnt = [temperature] if only_temperature else [*sides, temperature]
        if only_temperature:
            sides = [side.detach() for side in sides]
        loss = info_nce(sides, **options, temperature=temperature)
        return [loss.detach(), *torch.autograd.grad(loss, learnt, above)]

    calls = []
    in_one_call = CpuBackend.further
    monkeypatch.setattr(
        CpuBackend, "further", lambda *given: calls.append(name) or in_one_call(*given)
    )
    one = function(tensors)
    assert calls
    count = len(calls)
    monkeypatch.setattr(CpuBackend, "serves_further", lambda *_: False)
    monkeypatch.setattr(CpuBackend, "leaves_further", lambda *_: False)
    prepared.forget()
    parts = function(tensors)
    assert len(calls) == count
    moved = conditioning(function, tensors)
    eps = torch.finfo(torch.float64).eps
    for place, (got, truth, move) in enumerate(zip(one, parts, moved, strict=True)):
        given = {"size": rows / 0.3, "moved": eps * move}
        assert_close(f"result {place}", got, truth, truth, torch.float64, **given)


@pytest.mark.parametrize("name", IN_BANDS)
def test_columns_as_they_are(name, monkeypatch, usable):
    """Columns that are multiplied by their inverse norms while they are packed for each band give
    the bits of unit rows, which are made of columns with gaps.
    """
    usable("cpu")
    monkeypatch.setattr(further, "band_rows", lambda *_: 12)
    monkeypatch.setattr(CpuBackend, "serves_further", lambda *_: True)
    # Beyond kCached and kMostUnitRows in csrc/cpu/panel.h.
    width = 97
    columns = 4 * sizes.BAND // (width * 4) + 101
    (x, y, *own), options = made(name, fresh(83), 31, columns, width, references=columns)
    x, y, *own = (side.float() for side in (x, y, *own))

    def results(change):
        sides = [side.requires_grad_() for side in (x.clone(), change(y), *map(torch.clone, own))]
        given = dict(options)
        if "references" in given:
            given["references"] = change(given["references"].float())
        loss = info_nce(sides, **given)
        return [loss.detach(), *torch.autograd.grad(loss, sides)]

    as_they_are = results(torch.clone)
    of_unit_rows = results(lambda side: side.repeat_interleave(2, dim=1)[:, ::2])
    for got, wanted in zip(as_they_are, of_unit_rows, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", IN_BANDS)
def test_metrics_in_bands(name, usable, small_panels):
    usable("cpu")
    sides, options = made(name, fresh(84), 43, 47)
    with fastsim.metrics() as mine:
        info_nce(sides, **options)
    with fastsim.metrics() as panels, in_panels():
        info_nce(sides, **options)
    assert mine.read() == pytest.approx(panels.read(), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", IN_BANDS)
def test_bands_of_two_threads_give_the_bits_of_one(name, monkeypatch, usable):
    usable("cpu")
    monkeypatch.setattr(further, "band_rows", lambda *_: 252)
    sides, options = made(name, fresh(85), 1030, 1100, 40, references=700)
    sides = [side.float().requires_grad_() for side in sides]
    if "references" in options:
        options["references"] = options["references"].float()

    def results():
        loss = info_nce(sides, **options)
        return [loss.detach(), *torch.autograd.grad(loss, sides)]

    assert_same_bits(results, (1, 2))


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


def test_as_many_scores_as_two_panels_hold(monkeypatch, usable):
    """With directions, of all parts together; more are made a part at a time. Without directions
    only products of parts are a reason not to make all scores side by side.
    """
    usable("cpu")
    serves, most = CpuBackend().serves_further, 2 * sizes.scores_of_a_panel()
    size = 2048, most // 2048 + 1, 4, torch.float32
    for directions in ((True, False, False), (False, True, False), (False, False, True)):
        assert serves(2048, most // 2048, 4, torch.float32, directions)
        assert not serves(*size, directions)
    none = False, False, False
    for in_parts in (False, True):
        monkeypatch.setattr(further, "parts_are_faster", lambda *_, found=in_parts: found)
        assert serves(*size, none) != in_parts

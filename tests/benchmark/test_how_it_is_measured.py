"""How `fastsim bench` measures: time in turns, peaks of memory, errors against float64."""

import contextlib
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsim.benchmark import ceilings, memory, timing
from fastsim.benchmark.accuracy import errors, relative
from fastsim.benchmark.baselines import ours
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import reason, step
from fastsim.benchmark.cases import CASES, problem_in
from fastsim.benchmark.settings import Settings

ROWS, WIDTH = 24, 10


def test_autocast_is_the_context_of_the_loss_alone():
    """float32 embeddings and gradients; the loss in bfloat16's context, its gradient outside."""
    seen = []

    def call(x, y):
        seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        x.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
        return (x * y).sum()

    problem = CASES["siglip"].problem(ROWS, WIDTH, **problem_in("autocast"))
    step(call, problem)
    assert seen == [torch.bfloat16, False]
    assert all(leaf.dtype == leaf.grad.dtype == torch.float32 for leaf in problem.leaves)
    assert errors(ours("cpu").call(problem), problem)["loss error"] > 1e-7  # the truth is outside
    with pytest.raises(ValueError, match=r"dtype: wanted one of float32, .*, got 'int8'"):
        Settings(dtype="int8")


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a function says so; returns that function."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    return spend


def test_baselines_take_turns(clock):
    calls = []

    def taking(name, seconds):
        def function():
            calls.append(name)
            clock(3.0 if calls.count(name) == 1 else seconds)  # a warm-up is slow

        return function

    found = timing.in_turns({"a": taking("a", 0.5), "b": taking("b", 2.0)}, seconds=4.0)
    assert "".join(calls) == "ab" + "abab" + "aa"  # b goes no further than its two rounds
    assert found == {"a": [0.5] * 4, "b": [2.0] * 2}


def test_a_function_that_fails_is_a_sentence(clock):
    def failing():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")

    found = timing.in_turns({"a": lambda: clock(1.0), "b": failing}, seconds=0.0, most=3)
    assert found == {"a": [1.0, 1.0], "b": "out of memory"}
    assert reason(ValueError("one\ntwo")) == "ValueError: one"
    assert reason(UnavailableError("no")) == "no"


def test_a_summary_keeps_the_best_of_each_part():
    row = timing.summary([5e-3, 4e-3, 3e-3, 7e-3, 9e-3, 8e-3])
    assert row == {"repeats ms": [4.0, 3.0, 8.0], "median ms": 6.0, "rounds": 6}


def test_no_memory_is_a_sentence_of_its_own():
    for error in (MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("not enough memory")):
        assert reason(error) == "out of memory"


def test_ceilings_are_rates_of_what_was_done(monkeypatch):
    """Bytes read and written, exponentials, and the operations of three products."""

    def in_turns(functions, **_):
        return {name: [2e-4, 1e-4] for name in functions}

    monkeypatch.setattr(ceilings, "in_turns", in_turns)
    monkeypatch.setattr(ceilings, "PANEL", {"cpu": (300, 200)})
    copy, exp = ceilings.machine_rows()
    products = ceilings.product_rows(96, 64)
    # Written with three digits after the point, those of products with two.
    assert copy["GB/s"] == pytest.approx(2 * 4 * 2**26 / 1e-4 / 1e9, abs=1e-3)
    assert exp["G/s"] == pytest.approx(300 * 200 / 1e-4 / 1e9, abs=1e-3)
    assert products["GFLOP/s"] == pytest.approx(3 * 2 * 96 * 96 * 64 / 1e-4 / 1e9, abs=1e-2)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_bare_products_are_as_many_as_those_of_a_loss(count, monkeypatch):
    """Over panels, of which the last is lower: operations are counted where torch makes them."""
    monkeypatch.setattr(ceilings, "BAND", {"cpu": 10})
    run = ceilings.bare_products(24, 6, count=count)
    with Products() as made:
        run()
    assert made.operations == count * 2 * 24 * 24 * 6


class Products(TorchDispatchMode):
    """Counts the operations of products."""

    operations = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.__name__.split(".")[0] in ("mm", "addmm_"):
            left, right = arguments[-2:]
            self.operations += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return function(*arguments, **(options or {}))


def test_peak_memory():
    rows, matrix = 2048, 2048**2 * 4 / 2**20
    eager = memory.rise("info_nce", "eager torch", rows, 16)
    # Scores, their softmax and its gradient; not more than a formula could hold at once.
    assert 2 * matrix < eager < 8 * matrix
    assert memory.rise("info_nce", "eager torch", rows, 16, limit=int(matrix * 2**20)) == (
        "out of memory"
    )


def test_a_rise_leaves_out_the_gradients(monkeypatch, tmp_path):
    marks = iter([10**6, 10**6 + 5000])
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear")
    monkeypatch.setattr(memory, "_high_water_mark", lambda: next(marks))
    problem = CASES["siglip"].problem(8, 4)
    gradients = 2 * 8 * 4 * 4
    assert memory.resident_rise(ours("eager").call(problem), problem) == 5000 - gradients


def test_memory_is_limited_within_a_block_alone():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(ZeroDivisionError), memory.limited(2**40):
        within = resource.getrlimit(resource.RLIMIT_DATA)
        raise ZeroDivisionError
    assert (within != before) == memory._STATM.exists()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(("held", "limit"), [(8, 6.4), (20, 16.0), (64, 16.0)])
def test_the_usual_limit_leaves_a_fifth(held, limit, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": held * 2**18, "SC_PAGE_SIZE": 2**12}.get)
    assert memory.usual_limit() == limit


def test_an_error_is_relative_to_float64():
    problem = CASES["info_nce"].problem(ROWS, WIDTH, dtype=torch.float64)
    exact = ours("eager").call(problem)
    assert errors(exact, problem) == {"loss error": 0.0, "gradient error": 0.0}
    off = errors(lambda *leaves: exact(*leaves) * 1.01, problem)
    assert off["loss error"] == pytest.approx(0.01)
    assert off["gradient error"] == pytest.approx(0.01)
    assert relative(torch.ones(4), torch.zeros(4)) == 2.0
    tiny = torch.full((4,), 1e-30)  # its squares are none
    assert relative(2 * tiny, tiny) == pytest.approx(1.0)


def test_a_step_leaves_fresh_gradients():
    problem = CASES["siglip"].problem(4, 4)
    call = ours("eager").call(problem)
    step(call, problem)
    first = problem.leaves[0].grad.clone()
    step(call, problem)
    assert torch.equal(problem.leaves[0].grad, first)

"""bench/gpu.py with small sizes on a CPU: what a GPU's minutes are spent on has run before."""

import importlib
import os
import time

import pytest
import torch
from click.testing import CliRunner

from bench import gpu, gpu_checks, workers
from bench.gpu_checks import OPERANDS, narrowed, problem_of
from fastsim.backends import get
from fastsim.benchmark import results, tables
from fastsim.benchmark.cases import CASES

SMALL = (
    *("--device", "cpu", "--sizes", "24,40", "--dim", "16", "--checked", "64"),
    *("--ragged", "13,29,10", "--square", "64", "--largest", "96", "--seconds", "0.01"),
    *("--workers", "2"),
)


@pytest.fixture(autouse=True)
def products_of_every_cpu(monkeypatch):
    """A CPU stands in for the GPU, whose TF32 is looked at: AMX has a "high" precision of its own,
    which tests/backends/cpu/test_amx.py looks at.
    """
    monkeypatch.setenv("FASTSIM_AMX", "0")


def picked(found, /, **wanted):
    return [row for row in found if wanted.items() <= row.items()]


def assert_whole(rows, backend, losses):
    """Whether there is a row for everything, and nothing is wrong."""
    mine = {"implementation": f"fastsim {backend}"}
    for loss in losses:
        for operand in OPERANDS:
            errors = picked(rows, measure="error", loss=loss, dtype=operand, **mine)
            assert {row["rows"] for row in errors} == {13, 64}
            assert all(row["passed"] for row in errors), errors
        assert picked(rows, measure="repeats", loss=loss, passed=True, **mine)
        for n in (24, 40):
            times = picked(rows, measure="time", loss=loss, rows=n, **mine)
            assert len(times) == 1
            assert min(times[0]["repeats ms"]) > 0
            if CASES[loss].products[1]:
                assert times[0]["share of ceiling"] > 0
    assert picked(rows, measure="ceiling", name="products", rows=40)
    (last,) = picked(rows, rows=96, loss="info_nce", **mine)
    assert last["repeats ms"][0] > 0
    assert not [row for row in rows if "process lost" in row]


def test_the_session(tmp_path):
    out = tmp_path / "gpu.jsonl"
    baselines = ("--baseline", "eager torch", "--baseline", "inf-cl")
    done = CliRunner().invoke(
        gpu.main,
        [*SMALL, *baselines, "--backend", "cpu", "--out", str(out)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    about, rows = results.read(out)
    assert about["settings"]["dims"] == [16]
    assert_whole(rows, "cpu", CASES)
    for loss in CASES:
        assert picked(rows, loss=loss, implementation="eager torch", rows=40)[0]["repeats ms"]
    why = picked(rows, implementation="inf-cl")[0]["not measured"]
    assert why in ("it serves a GPU only", "inf_cl is not installed")
    assert "info_nce, 40 x 16" in tables.text(about, rows)


def test_a_stage_without_time_says_so(tmp_path):
    out = tmp_path / "gpu.jsonl"
    losses = ("--loss", "siglip", "--backend", "cpu", "--baseline", "none")
    done = CliRunner().invoke(gpu.main, [*SMALL, *losses, "--minutes", "0", "--out", str(out)])
    about, rows = results.read(out)
    assert {row["not measured"] for row in rows} == {"the time of its stage was over"}
    assert {row["measure"] for row in rows} == {"error", "repeats", "ceiling", "time"}
    assert "the time of its stage was over" in tables.text(about, rows)
    # What was not checked is not right.
    assert done.exit_code == 1
    assert "0 checks failed, 9 could not be done, 0 rows lost" in done.output


def test_a_wrong_gradient_fails(monkeypatch):
    backend = type(get("cpu"))
    wrong = backend.forward

    def off(self, tile, *operands, **options):
        return [1.01 * part for part in wrong(self, tile, *operands, **options)]

    monkeypatch.setattr(backend, "forward", off)
    monkeypatch.setattr(backend, "serves_one_call", lambda *_: False)
    shape = (13, 29, 10)
    row = gpu_checks.error("info_nce symmetric", "cpu", shape, "float32", "cpu")
    assert not row["passed"]
    assert row["gradient error"] > 1e-3 > row["formula's gradient error"]


def test_fewer_rows_than_columns():
    problem = problem_of("matrix_mse", (5, 9, 4), "float32", "cpu", seed=0)
    whole = problem_of("matrix_mse", (9, 9, 4), "float32", "cpu", seed=0)
    assert [leaf.shape[0] for leaf in problem.leaves] == [5, 9]
    assert torch.equal(problem.leaves[0], whole.leaves[0][:5])
    ((rows, columns),) = problem.arguments
    assert torch.equal(rows, columns[:5])
    one_side = problem_of("nt_xent", (5, 9, 4), "float32", "cpu")
    assert narrowed(one_side, 5) is one_side


# ---- processes that are lost ----


def nothing(*_):
    return [{"done": os.getpid()}]


def refused():
    raise RuntimeError("one\ntwo")


def ended(name):
    if name == "all" or name == "b":
        os._exit(3)
    return [{"name": name}]


def hung():
    time.sleep(60)


def test_what_is_lost_is_lost_alone():
    found = []
    parts = tuple(workers.Task({"name": name}, ended, (name,)) for name in "abc")
    tasks = [
        workers.Task({"name": "first"}, nothing),
        workers.Task({"name": "refused"}, refused),
        workers.Task({"name": "all"}, ended, ("all",), parts),
        workers.Task({"name": "hung"}, hung),
        workers.Task({"name": "last"}, nothing),
    ]
    deadline = time.monotonic() + 100
    workers.run(tasks, found.extend, workers=1, deadline=deadline, seconds=3)
    ended_so = "the process ended with code 3"
    late = "no result within 3 s"
    first, last = found.pop(0), found.pop()
    assert first["done"] != last["done"] != os.getpid()
    assert found == [
        {"name": "refused", "not measured": "RuntimeError: one"},
        {"name": "a"},
        {"name": "b", "not measured": ended_so, "process lost": ended_so},
        {"name": "c"},
        {"name": "hung", "not measured": late, "process lost": late},
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
@pytest.mark.parametrize(("module", "what"), [("gpu", "measured"), ("tune_triton", "tuned")])
def test_without_a_gpu_a_command_says_so_in_one_line(module, what):
    if module == "tune_triton":
        pytest.importorskip("triton")
    done = CliRunner().invoke(importlib.import_module(f"bench.{module}").main)
    assert done.exit_code == 1
    assert done.output.strip() == f"Error: no GPU is visible; nothing was {what}"

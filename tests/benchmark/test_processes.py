"""Runs in several processes, one after the other, and the progress that they show."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from fastsim.benchmark import processes, progress
from fastsim.benchmark.cases import CASES, SIZES
from fastsim.benchmark.processes import joined
from fastsim.benchmark.settings import Settings


def test_processes_are_joined():
    place = {"measure": "time", "loss": "siglip", "rows": 64, "pass": "forward"}
    ours, theirs = (place | {"implementation": name} for name in ("fastsim cpu", "open_clip"))
    first = {"repeats ms": [2.0, 1.0], "median ms": 9.0, "rounds": 7, "GFLOP/s": 3.0}
    second = {"repeats ms": [0.5, 0.7], "median ms": 8.0, "rounds": 5, "GFLOP/s": 6.0}
    late = place | {"implementation": "inf-cl", "not measured": "a call would take too long"}
    rows = joined(
        [
            [ours | first, late, theirs | {"not measured": "out of memory"}],
            [theirs | second, ours | second],
            [late],
        ]
    )
    both = {"repeats ms": [1.0, 0.5], "rounds": 12, "GFLOP/s": 6.0}
    alone = {"repeats ms": [0.5], "rounds": 5, "GFLOP/s": 6.0}
    assert rows == [ours | both, late, theirs | alone]


def test_a_run_in_processes(monkeypatch, capfd):
    kept = {"sizes": (8,), "dims": (6,), "losses": ("siglip",), "baselines": ("eager torch",)}
    settings = Settings(**kept, measures=("time", "error"), seconds=0.01, processes=2)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "12345")
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    first, second = processes.run_in_processes(settings)
    assert "process 2 of 2" in capfd.readouterr().err
    assert (os.environ["MALLOC_TRIM_THRESHOLD_"], os.environ.get("MALLOC_TOP_PAD_")) == (
        "12345",
        None,
    )
    for count, (about, rows) in enumerate((first, second), 1):
        assert about["settings"]["processes"] == 2
        assert about["allocator"] == processes.ALLOCATOR
        times = [row for row in rows if "repeats ms" in row]
        assert {len(row["repeats ms"]) for row in times} == {count}
        names = [row["implementation"] for row in times if row["measure"] == "time"]
        assert names == ["fastsim cpu", "eager torch"] * 2
        assert len([row for row in rows if row["measure"] == "error"]) == 2


def test_later_processes_leave_out_the_largest(monkeypatch):
    asked = []

    class Pool:
        def __init__(self, *_):
            asked.append(os.environ["MALLOC_TOP_PAD_"])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, settings, *, progress):
            asked.append(settings)
            return self

        def result(self):
            return {}, []

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    settings = Settings(processes=5, measures=("time",))
    assert [rows for _, rows in processes.run_in_processes(settings, progress=False)] == [[]] * 5
    whole, few = asked[1::2][:4], asked[1::2][4:]
    assert asked[::2] == [processes.ALLOCATOR["MALLOC_TOP_PAD_"]] * 5
    assert [s.sizes_of(CASES["info_nce"]) for s in whole] == [SIZES] * 4
    (last,) = few
    assert last.sizes_of(CASES["info_nce"]) == (64, 512, 2048)
    assert last.sizes_of(CASES["cosent"]) == CASES["cosent"].sizes  # there is no matrix


BEGUN = {
    "of times": "processes.run = lasting; processes._fresh(None, False)",
    "of memory": "memory.BASELINES = {}; memory.in_fresh_process(lasting)",
}


@pytest.mark.parametrize("kind", BEGUN)
def test_a_process_ends_with_the_one_that_began_it(kind):
    """Which SIGTERM ends without its knowing; the pipe ends when no process holds it."""
    imports = "from fastsim.benchmark import memory, processes; from tests.benchmark.tiny import *"
    began = subprocess.Popen(
        [sys.executable, "-c", f"{imports}; {BEGUN[kind]}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with began:
        worker = int(began.stdout.readline())
        try:
            began.send_signal(signal.SIGTERM)
            began.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    assert began.returncode == -signal.SIGTERM


def test_a_process_that_does_not_start_is_no_want_of_memory():
    """There is no file from which it could import the main module."""
    program = (
        "import os; from fastsim.benchmark import memory\n"
        "memory.BASELINES = {}\n"
        "if __name__ == '__main__': print(memory.in_fresh_process(os.getpid))"
    )
    done = subprocess.run(
        [sys.executable], input=program, capture_output=True, text=True, check=True
    )
    assert done.stdout == "the process that measures did not start\n"


def test_a_log_gets_lines(capsys, monkeypatch):
    steps = [(1, "small", "a"), (3, "large", "b")]
    monkeypatch.setattr(progress, "SECONDS", 0)
    assert list(progress.with_progress(steps)) == steps
    assert capsys.readouterr().err == "  0%  small\n 25%  large\n"
    assert list(progress.with_progress(steps, visible=False)) == steps
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    assert list(progress.with_progress(steps)) == steps
    assert "100%" in capsys.readouterr().err

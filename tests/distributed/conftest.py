"""One start of processes for all tests of this folder: to import takes seconds."""

import fcntl
import os
import subprocess
import sys
import time

import pytest
import torch

import fastsim
from tests.distributed import ranks
from tests.seeds import SEED

LIMIT = 900  # seconds, on a machine that does other things beside


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """What each of four gloo processes found (work.py)."""
    reason = fastsim.backends()["cpu"]
    if reason is not None:
        pytest.skip(f"cpu: {reason}")
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # of all processes of this run of pytest: one of them starts the ranks
    folder, count = place / "ranks", max(ranks.RANKS)
    with open(place / "ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            _start(folder, count)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def _start(folder, count):
    """Run the ranks to their end."""
    command = [sys.executable, "-m", "tests.distributed.work"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        with open(log, "w") as said:
            arguments = [*command, str(rank), str(count), str(folder), str(SEED)]
            processes.append(subprocess.Popen(arguments, env=environment, stderr=said))
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        if any(p.poll() for p in processes):
            break  # the others would wait for it
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    said = [log.read_text()[-3000:] for log in logs]
    codes = [p.returncode for p in processes]
    assert not any(codes), (
        f"FASTSIM_SEED={SEED}, exit codes {codes} (-9: longer than {LIMIT} s)\n{said}"
    )

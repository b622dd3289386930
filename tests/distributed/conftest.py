"""One start of processes for all tests of this folder: to import takes seconds."""

import fcntl
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import fastsim
from tests.distributed import ranks
from tests.distributed.processes import exit_codes
from tests.seeds import SEED


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


@pytest.fixture
def alone():
    """A group of this process alone, whose columns go nowhere."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


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
    codes = exit_codes(processes)
    said = [log.read_text()[-3000:] for log in logs]
    assert not any(codes), f"FASTSIM_SEED={SEED}, exit codes {codes} (-9: ended here)\n{said}"

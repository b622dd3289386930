"""One start of processes for all tests of this folder: to import takes seconds."""

import os
import subprocess
import sys
import time

import pytest
import torch

import fastsim
from tests.distributed import ranks

LIMIT = 200  # seconds


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """What each of four gloo processes found (work.py)."""
    reason = fastsim.backends()["cpu"]
    if reason is not None:
        pytest.skip(f"cpu: {reason}")
    folder = tmp_path_factory.mktemp("ranks")
    count = max(ranks.RANKS)
    command = [sys.executable, "-m", "tests.distributed.work"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    seed = str(int(os.environ.get("FASTSIM_SEED", torch.seed() % 2**31)))
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        with open(log, "w") as said:
            arguments = [*command, str(rank), str(count), str(folder), seed]
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
    assert not any(p.returncode for p in processes), (seed, said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]

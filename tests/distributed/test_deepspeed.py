"""GradCache around DeepSpeed's engine: right gradients, reduced once a step, for ZeRO-1 to 3."""

import os
import socket
import subprocess
import sys

import pytest
import torch

pytest.importorskip("deepspeed")
from tests.seeds import SEED

STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{stage: (error of the step, gradient reductions)} of each of two processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "FASTSIM_SEED": str(SEED),
        }
        command = [sys.executable, "-m", "tests.distributed.deepspeed_work", str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=300)[1].decode()[-3000:] for process in processes]
    assert not any(process.returncode for process in processes), said
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_once_a_step(stage, found):
    for rank in found:
        error, reductions = rank[stage]
        assert error <= 1e-5  # float32: sums in another order
        assert reductions == 1


def test_steps_that_the_engine_accumulates(found):
    """Two calls of GradCache to one step of the engine."""
    for rank in found:
        assert rank["accumulated"] <= 1e-5

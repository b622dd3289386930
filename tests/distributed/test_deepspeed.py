"""GradCache around DeepSpeed's engine: right gradients, reduced once a step, for ZeRO-1 to 3."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("deepspeed")
from tests.distributed.processes import exit_codes
from tests.rendezvous import rendezvous
from tests.seeds import SEED

STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{stage: (error of the step, gradient reductions)} of each of two processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "tests.distributed.deepspeed_work", str(folder)]
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "FASTSIM_SEED": str(SEED)}
    processes, logs = [], [folder / f"{rank}.log" for rank in range(2)]
    with rendezvous(2) as common:
        for rank, log in enumerate(logs):
            place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | own
            with open(log, "w") as said:
                processes.append(subprocess.Popen(command, env=os.environ | place, stderr=said))
        codes = exit_codes(processes)
    assert not any(codes), (codes, [log.read_text()[-3000:] for log in logs])
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

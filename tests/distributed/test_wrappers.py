"""Wrapped encoders reduce once a step; no rank waits for one that failed. See wrappers.py."""

import os
import subprocess
import sys

import pytest
import torch

RANKS = (2, 3)
# float32: sums in another order. The limit of test_losses.py, which says the same of the losses.
ALLOWED = 1e-5


@pytest.fixture(scope="module", params=RANKS)
def results(request, tmp_path_factory):
    """What each process found; one start for all tests of as many processes."""
    folder = tmp_path_factory.mktemp("wrappers")
    count, seed = request.param, str(torch.seed() % 2**31)
    command = [sys.executable, "-m", "tests.distributed.wrappers"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        with open(log, "w") as said:
            arguments = [*command, str(rank), str(count), str(folder), seed]
            processes.append(subprocess.Popen(arguments, env=environment, stderr=said))
    codes = [process.wait(timeout=200) for process in processes]
    assert not any(codes), (seed, [log.read_text()[-2000:] for log in logs])
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize("wrapper", ["ddp", "function_around_ddp", "fsdp", "deepspeed"])
def test_gradients_are_reduced_once_a_step(wrapper, results):
    """Unequal ranks, each with its own number of micro-batches."""
    for rank in results:
        error, reductions = rank[wrapper]
        assert error <= ALLOWED
        # FSDP2 reduces each of its two layers by itself.
        assert reductions == {"fsdp": 2}.get(wrapper, 1)


def test_a_rank_without_rows_takes_part(results):
    assert all(rank["no rows"] <= ALLOWED for rank in results)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("temperature", "temperature: wanted"),
        ("positives", "positives: wanted"),
        ("exclude", "exclude\\[1\\]: wanted"),
        ("targets", "targets\\[1\\]: wanted"),
        ("matrix", "targets: wanted"),
        ("embeddings", "embeddings: wanted"),
        ("labels", "labels: wanted"),
        ("encoder", "no such token"),
    ],
)
def test_a_refusal_on_one_rank_is_raised_on_all(name, reason, results):
    import re

    for number, rank in enumerate(results):
        said, seconds = rank["refusals"][name]
        assert re.search(reason, said), said
        assert seconds < 5
        if number != 1:
            assert "rank 1" in said
        assert rank["refusals"]["after"] is True


def test_a_learnt_temperature_has_one_gradient(results):
    """Without DistributedDataParallel too: the mean over the ranks is that of one process."""
    for rank in results:
        for own, whole in rank["learnt"]:
            assert abs(own - whole) <= ALLOWED * abs(whole)
    first = [own for own, _ in results[0]["learnt"]]
    assert all([own for own, _ in rank["learnt"]] == first for rank in results)


def test_groups_are_copied_saved_and_meshes(results):
    for rank in results:
        assert rank["groups"] == [True, True, True]

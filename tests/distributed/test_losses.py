"""Losses over process groups against one process with everything; see tests/ranks.py."""

import inspect
import os
import subprocess
import sys
import time

import pytest
import torch

import fastsim
from tests.distributed import ranks

# float32: as asked for; float64: what a few thousand roundings leave.
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process found; one start for all tests, since importing takes seconds."""
    reason = fastsim.backends()["cpu"]
    if reason is not None:
        pytest.skip(f"cpu: {reason}")
    folder = tmp_path_factory.mktemp("ranks")
    count = max(ranks.RANKS)
    command = [sys.executable, "-m", "tests.distributed.ranks"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    seed = str(int(os.environ.get("FASTSIM_SEED", torch.seed() % 2**31)))
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        with open(log, "w") as said:
            arguments = [*command, str(rank), str(folder), seed]
            processes.append(subprocess.Popen(arguments, env=environment, stderr=said))
    end = time.monotonic() + 300
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        if any(p.poll() for p in processes):
            break  # the others would wait for it
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    assert not any(p.returncode for p in processes), (seed, [log.read_text() for log in logs])
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("count", ranks.RANKS)
@pytest.mark.parametrize("case", ranks.BATCHWISE, ids=repr)
def test_ranks_together_are_one_process(case, count, exchange, results):
    if exchange not in [way[0] for way in ranks.ways(case)]:
        pytest.skip(f"no {exchange}")
    found = [
        (error, way)
        for rank in results
        for way, error in rank["errors"].items()
        if way[:3] == (case.name, count, exchange)
    ]
    assert len(found) >= 2 * count
    for error, way in found:
        assert error <= ALLOWED[way[4]], way


def test_every_loss_with_a_group_is_there():
    functions = [value for value in vars(fastsim).values() if hasattr(value, "__kwdefaults__")]
    wanted = {inspect.unwrap(f) for f in functions if "group" in (f.__kwdefaults__ or {})}
    assert {inspect.unwrap(case.loss) for case in ranks.BATCHWISE} == wanted
    assert len(wanted) >= 13


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("width", "width: wanted the same on every rank .* got (6,) on rank 0 and (7,) on rank 1"),
        ("temperature", "temperature: .* got 0.1 on rank 0 and 1.1 on rank 1"),
        ("learnt", "temperature: .* got 0.1.* on rank 0 and 1.1.* on rank 1"),
        ("loss", "loss: .* got 'info_nce' on rank 0 and 'siglip' on rank 1"),
        ("symmetric", "symmetric: .* got True on rank 0 and False on rank 1"),
        ("dtype", "dtype: .* got torch.float32 on rank 0 and torch.float16 on rank 1"),
        ("exchange", "exchange: .* got 'gather' on rank 0 and 'ring' on rank 1"),
        ("targets", "targets: .* on rank 0 and None on rank 1"),
        ("exclude", "exclude: .* got None on rank 0 and .*torch.int64"),
        ("gradient", "gradient of rows: .* got True on rank 0 and False on rank 1"),
        ("nt_xent", "temperature: .* got 0.1 on rank 0 and 1.1 on rank 1"),
        ("multi_similarity", "beta: .* got 9.0 on rank 0 and 10.0 on rank 1"),
        ("batch_hard_triplet", "soft: .* got True on rank 0 and False on rank 1"),
        ("hardest_pairs", "distance: .* got 'euclidean' on rank 0 and 'cosine' on rank 1"),
        ("references", "references: .* got None on rank 0 and a tensor .* on rank 1"),
        ("own first", "own_first: .* got True on rank 0 and False on rank 1"),
    ],
)
def test_ranks_that_differ_are_refused(name, said, results):
    import re

    pattern = said.replace("(", r"\(").replace(")", r"\)")
    for rank in results:
        assert re.match(pattern, rank["refusals"][name])
        assert rank["refusals"]["after"] is True


def test_micro_batches_of_unequal_ranks_synchronise_once(results):
    for rank in results:
        error, buckets = rank["micro-batches"]
        assert error <= ALLOWED[torch.float32]
        assert buckets == [4]  # all parameters, once


@pytest.mark.parametrize(("name", "limit"), [("slow", 2), ("dead", 20)])
def test_a_rank_that_does_not_answer_fails_the_others(name, limit, results):
    for rank in results[:-1]:
        said, seconds = rank[name]
        assert said != "no error"
        assert seconds < limit + 3

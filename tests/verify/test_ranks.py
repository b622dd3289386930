"""The ranks of a group agree on a backend: right on each of them, by the slowest."""

import datetime
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fastsim.verify import verdicts

CPU = torch.device("cpu")
NAMES = ["triton", "cuda"]
# Times over the torch backend's by rank, None where a rank refuses; what they agree on.
CASES = {
    "sigmoid": ([{"triton": 0.5, "cuda": 0.4}, {"triton": 0.6, "cuda": 0.9}], "triton"),
    "levels": ([{"triton": 0.5, "cuda": 0.4}, {"triton": None, "cuda": 0.9}], "cuda"),
    "softmax": ([{"triton": 0.5, "cuda": 0.4}, {"triton": 2.0, "cuda": None}], None),
    "closest": ([{"triton": 0.5, "cuda": 0.4}, {}], None),
}


# What the ranks do between two questions; after each they have to agree without an exchange or with
# one, but all of them alike.
LONE = "a verdict of another kind on one rank alone"
BOTH = "another precision of float32 products"
OTHER = "another group of the same name"


def again(rank, folder, group):
    """What the ranks find when they ask for a kind anew, and whether they exchanged anything."""
    found = {}

    def ask(what, group):
        told = []
        kept, verdicts.agree = verdicts.agree, lambda *a, **o: told.append(a) or kept(*a, **o)
        name = verdicts.agreed(NAMES, "sigmoid", torch.float32, CPU, group)
        verdicts.agree = kept
        found[what] = name, len(told)

    if rank == 0:
        of = verdicts.key("triton", "circle", torch.float32, CPU)
        verdicts.write(verdicts.now(True, None, 0.5, of))
    ask(LONE, group)
    torch.set_float32_matmul_precision("high")  # of which there are no verdicts
    ask(BOTH, group)
    torch.set_float32_matmul_precision("highest")
    dist.destroy_process_group()
    join(rank, f"{folder}/meet again")
    ask(OTHER, dist.group.WORLD)
    return found


AGAIN = {LONE: ["triton", 0], BOTH: [None, 1], OTHER: ["triton", 1]}


def join(rank, store):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )


def run(rank, folder):
    os.environ["FASTSIM_CACHE"] = f"{folder}/cache{rank}"
    for kind, (ranks, _) in CASES.items():
        for name, ratio in ranks[rank].items():
            of = verdicts.key(name, kind, torch.float32, CPU)
            reason = "it lies" if ratio is None else None
            verdicts.write(verdicts.now(ratio is not None, reason, ratio, of))
    join(rank, f"{folder}/meet")
    group = dist.group.WORLD
    found = {kind: verdicts.agreed(NAMES, kind, torch.float32, CPU, group) for kind in CASES}
    found |= again(rank, folder, group)
    dist.destroy_process_group()
    print(json.dumps(found))


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not there")
def test_ranks_agree(tmp_path):
    command = [sys.executable, "-m", "tests.verify.test_ranks"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        out, _ = process.communicate(timeout=120)
        found = json.loads(out.splitlines()[-1])
        assert found == {kind: wanted for kind, (_, wanted) in CASES.items()} | AGAIN


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])

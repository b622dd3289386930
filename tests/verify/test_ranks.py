"""The ranks of a group agree on a backend: right on each of them, by the slowest."""

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


def run(rank, folder):
    os.environ["FASTSIM_CACHE"] = f"{folder}/cache{rank}"
    for kind, (ranks, _) in CASES.items():
        for name, ratio in ranks[rank].items():
            of = verdicts.key(name, kind, torch.float32, CPU)
            reason = "it lies" if ratio is None else None
            verdicts.write(verdicts.now(ratio is not None, reason, ratio, of))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    group = dist.group.WORLD
    found = {kind: verdicts.agreed(NAMES, kind, torch.float32, CPU, group) for kind in CASES}
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
        assert found == {kind: wanted for kind, (_, wanted) in CASES.items()}


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])

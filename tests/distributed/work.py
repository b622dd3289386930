"""What one of the processes does for all tests of this folder; see conftest.py."""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

from tests.distributed import ranks, wrappers

# How long a rank waits for another. That much time has passed where the others were not told.
LIMIT = datetime.timedelta(seconds=300)
SLOW, DEAD = 2, 20  # seconds that the groups of a rank that does not answer wait

OTHERS = (1, 3)  # a group in which no process has the rank that it has among all


def main(rank, count, folder, seed):
    """Everything on one of `count` processes; results in `folder`."""
    torch.set_num_threads(1)
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=count, timeout=LIMIT)
    groups = {}
    for some in ranks.RANKS:
        group = dist.new_group(range(some))
        groups[some] = group if rank < some else None
    others = dist.new_group(OTHERS)
    start = time.monotonic()
    found = {"refusals": ranks.refusals(dist.group.WORLD)}
    found["errors"], found["calls"] = ranks.everything(groups, seed)
    found["seen"] = ranks.seen_by(groups[3], seed)
    found["lengths"] = ranks.of_other_lengths(groups[3], seed)
    found["others"] = ranks.of_others(others, seed) if rank in OTHERS else None
    print(f"losses {time.monotonic() - start:.1f} s", file=sys.stderr)
    found["wrappers"] = {
        some: wrappers.everything(group, seed)
        for some, group in groups.items()
        if group is not None and some in wrappers.RANKS
    }
    print(f"and wrappers {time.monotonic() - start:.1f} s", file=sys.stderr)
    dist.barrier()
    slow = dist.new_group(timeout=datetime.timedelta(seconds=SLOW))
    last = rank == count - 1
    found["slow"] = time.sleep(SLOW + 2) if last else ranks.failure(slow, SLOW)
    dead = dist.new_group(timeout=datetime.timedelta(seconds=DEAD))
    dist.barrier()
    found["dead"] = None if last else ranks.failure(dead, DEAD)
    torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)  # nobody waits for the others


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

"""Selections of 16-bit rows around a ring: each process finds the rows of the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import fastsim
from fastsim.distributed import Ring
from tests.backends.triton.interpreted.test_selection import ROUNDING, check_hardest, near
from tests.backends.triton.interpreter import adjust

OWN = slice(0, 17), slice(17, 33)  # the rows of either process


def find(rank, folder, x, y, groups):
    adjust()
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=len(OWN))
    own, ring = OWN[rank], Ring(dist.group.WORLD)
    pairs = fastsim.hardest_pairs(
        x[own], groups[own], distance="cosine", group=ring, backend="triton"
    )
    losses = fastsim.full_triplet(x[own], y[own], reduction="none", group=ring, backend="triton")
    found = {"pairs": tuple(pairs), "losses": losses}
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_near_rows(dtype, tmp_path):
    x, y, groups = near(33, dtype), near(33, dtype), torch.arange(33) % 8
    torch.multiprocessing.spawn(find, (str(tmp_path), x, y, groups), len(OWN))
    parts = [torch.load(tmp_path / str(rank)) for rank in range(len(OWN))]
    _, _, positives, negatives = map(
        torch.cat, zip(*(part["pairs"] for part in parts), strict=True)
    )
    check_hardest(x, groups, positives, negatives)
    whole = fastsim.full_triplet(x, y, reduction="none", backend="triton")
    # Of the mean, the closest and the positive twice, each once on one process and once on two.
    parted = torch.cat([part["losses"] for part in parts])
    assert (parted - whole).abs().max() <= 8 * ROUNDING

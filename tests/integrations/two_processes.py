"""Runs a test's function in two processes that can exchange tensors."""

import warnings

import torch

WORLD = 2


def share(tensor, rank, rows):
    """The rows of a rank, of which each has so many."""
    return tensor[rank * rows : (rank + 1) * rows]


def of_each_rank(work, folder):
    """[work(rank)] of two processes; `work` is a function of a module."""
    torch.multiprocessing.spawn(_run, (work, str(folder)), nprocs=WORLD)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(WORLD)]


def _run(rank, work, folder):
    warnings.simplefilter("ignore")  # peers call what torch warns of
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    torch.save(work(rank), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()

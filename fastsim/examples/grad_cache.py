"""A plain loop with batches of any size, in one process or several.

    python -m fastsim.examples.grad_cache
    torchrun --standalone --nproc-per-node 2 -m fastsim.examples.grad_cache

The encoder sees 8 texts at a time; the loss sees the whole batch, of all processes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastsim import Encoder
from fastsim.grad_cache import GradCache
from fastsim.losses import InfoNCE
from fastsim.training.demo import situations


def main(model="sentence-transformers/all-MiniLM-L6-v2", steps=30):
    """The losses of the steps: of this process's rows, held against the rows of all."""
    several = "RANK" in os.environ  # set by torchrun
    if several:
        dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    encoder = Encoder.from_pretrained(model)
    wrapped = DistributedDataParallel(encoder, find_unused_parameters=True) if several else encoder

    def encode(texts):
        return wrapped(encoder.tokenize(texts))

    loss = InfoNCE(temperature=0.05, group=dist.group.WORLD if several else None)
    cache = GradCache(encode, loss, micro_batch_size=8, module=wrapped if several else None)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-4)
    rows, _ = situations()  # your own pairs of texts here
    encoder.train()  # with dropout: a model that is loaded has none
    mine, seen = rows[rank::ranks], []
    for step in range(steps):
        batch = [mine[(32 * step + i) % len(mine)] for i in range(32)]
        queries, documents = [row[0] for row in batch], [row[1] for row in batch]
        optimizer.zero_grad()
        seen.append(cache.backward(queries, documents).item())
        optimizer.step()
    if several:
        dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))

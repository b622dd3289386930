"""What test_wrappers.py runs on two and three processes: wrapped encoders, ranks that fail."""

import copy
import datetime
import io
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import fastsim
from fastsim import losses
from fastsim.grad_cache import GradCache
from tests.seeds import fresh, seed_of

ROWS = (16, 7, 9)  # of each rank: other numbers of micro-batches
SIZE = 4


def model(seed):
    torch.manual_seed(seed_of(seed))
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5))


def batches(ranks, seed, rows=ROWS):
    generator = fresh(seed)
    return [torch.randn(2, count, 6, generator=generator) for count in rows[:ranks]]


def wanted(parts, seed):
    """The gradients of one process that has everything."""
    encode = model(seed)
    fastsim.siglip(*(encode(side) for side in torch.cat(parts, 1))).backward()
    return [p.grad for p in encode.parameters()]


def worst(found, truth):
    pairs = zip(found, truth, strict=True)
    return max(((f - t).abs().max() / t.abs().max()).item() for f, t in pairs)


def ddp(group, seed):
    count = []

    def hook(state, bucket):
        count.append(1)
        return default_hooks.allreduce_hook(state, bucket)

    wrapped = torch.nn.parallel.DistributedDataParallel(model(seed), process_group=group)
    wrapped.register_comm_hook(group, hook)
    return wrapped, count, lambda: [p.grad for p in wrapped.parameters()]


def fsdp(group, seed):
    ranks = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (ranks,))
    encode, count = model(seed), []
    for layer in encode:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(encode, mesh=mesh)
    return encode, count, lambda: [p.grad.full_tensor() for p in encode.parameters()]


class Engine(torch.nn.Module):
    """DeepSpeed's interface: it reduces at the boundary of an accumulation, in its own backward."""

    def __init__(self, module, group, count):
        super().__init__()
        self.module, self.group, self.count, self.boundary = module, group, count, True

    def forward(self, *inputs):
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.boundary = is_boundary

    def backward(self, loss, scale_wrt_gas=True):
        assert scale_wrt_gas is False
        loss.backward()
        if self.boundary:
            self.count.append(1)
            for p in self.module.parameters():
                dist.all_reduce(p.grad, group=self.group)
                p.grad /= dist.get_world_size(self.group)


def deepspeed(group, seed):
    count = []
    engine = Engine(model(seed), group, count)
    return engine, count, lambda: [p.grad for p in engine.module.parameters()]


def function_around_ddp(group, seed):
    wrapped, count, gradients = ddp(group, seed)
    return (lambda side: wrapped(side)), count, gradients


def step_of(make, group, seed, rows=ROWS):
    """(error of the gradients, reductions) of a step of GradCache."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    encode, count, gradients = make(group, seed)
    parts = batches(ranks, seed, rows)
    cache = GradCache(encode, losses.SigLIP(group=group), micro_batch_size=SIZE)
    scatter, scattered = _fsdp_param_group.foreach_reduce, []

    def counted(*arguments, **options):
        scattered.append(1)
        return scatter(*arguments, **options)

    _fsdp_param_group.foreach_reduce = counted
    try:
        cache.backward(*parts[rank])
    finally:
        _fsdp_param_group.foreach_reduce = scatter
    return worst(gradients(), wanted(parts, seed)), len(count) or len(scattered)


def failing_encoder(group, seed):
    wrapped, _, _ = ddp(group, seed)

    def encode(side):
        if dist.get_rank(group) == 1:
            raise ValueError("no such token")
        return wrapped(side)

    cache = GradCache(encode, losses.SigLIP(group=group), micro_batch_size=SIZE, module=wrapped)
    cache.backward(*batches(dist.get_world_size(group), seed)[dist.get_rank(group)])


def refusals(group, seed):
    """What each rank says of a call that rank 1 alone refuses, and after how many seconds."""
    rank = dist.get_rank(group)
    x = torch.randn(4, 6)
    ids = torch.arange(4)
    bad = ids + 100 * (rank == 1)
    temperature = -1.0 if rank == 1 else 1.0
    found = {}
    for name, call in {
        "temperature": lambda: fastsim.info_nce(x, x, temperature=temperature, group=group),
        "positives": lambda: fastsim.info_nce(x, x, bad, group=group),
        "exclude": lambda: fastsim.info_nce(x, x, exclude=(ids, ids[rank == 1 :]), group=group),
        "targets": lambda: fastsim.siglip(x, x, (ids, ids[rank == 1 :]), group=group),
        "matrix": lambda: fastsim.siglip(
            x, x, torch.ones(4, 4 * dist.get_world_size(group) + (rank == 1)), group=group
        ),
        "embeddings": lambda: fastsim.sup_con(x[0] if rank == 1 else x, ids, group=group),
        "labels": lambda: fastsim.cosent(x[:, 0], ids[rank == 1 :], group=group),
        "encoder": lambda: failing_encoder(group, seed),
    }.items():
        start = time.monotonic()
        try:
            call()
            said = "no error"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = said, time.monotonic() - start
    found["after"] = fastsim.info_nce(x, x, group=group).isfinite().item()
    return found


def learnt(group, seed):
    """The gradients of a learnt temperature on this rank and in one process with everything."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = batches(ranks, seed)
    found = []
    for backend in ("cpu", "eager"):
        temperature = torch.tensor(0.3, requires_grad=True)
        options = {"temperature": temperature, "backend": backend}
        fastsim.info_nce(*parts[rank], group=group, **options).backward()
        own = temperature.grad.clone()
        temperature.grad = None
        fastsim.info_nce(*torch.cat(parts, 1), **options).backward()
        found.append((own.item(), temperature.grad.item()))
    return found


def groups(group):
    """Modules that hold a group are copied and saved; a mesh is a group."""
    module = losses.SigLIP(group=group)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    x = torch.randn(4, 6)
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    others = copy.deepcopy(module), torch.load(saved, weights_only=False), losses.SigLIP(group=mesh)
    return [torch.equal(module(x, x), other(x, x)) for other in others]


def work(rank, ranks, folder, seed):
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks, timeout=limit)
    group = dist.group.WORLD
    makes = (ddp, function_around_ddp, fsdp, deepspeed)
    found = {make.__name__: step_of(make, group, seed) for make in makes}
    found["no rows"] = step_of(ddp, group, seed, rows=(16, 0, 9))[0]
    found["refusals"] = refusals(group, seed)
    found["learnt"] = learnt(group, seed)
    found["groups"] = groups(group)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    import sys

    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

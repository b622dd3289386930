"""What test_wrappers.py runs on two and three processes: wrapped encoders, ranks that fail."""

import copy
import importlib
import io
import itertools
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastsim
from fastsim import losses
from fastsim.grad_cache import GradCache
from fastsim.verify import verdicts
from tests.seeds import fresh, seed_of

RANKS = (2, 3)
ROWS = (16, 7, 9)  # of each rank: other numbers of micro-batches
SIZE = 4


def model(seed, middle=None):
    """middle: a layer that changes nothing, put between the others."""
    torch.manual_seed(seed_of(seed))
    layers = torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5)
    return torch.nn.Sequential(*layers[:2], middle or torch.nn.Identity(), layers[2])


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


def ddp(group, seed, middle=None):
    count = []

    def hook(state, bucket):
        count.append(1)
        return default_hooks.allreduce_hook(state, bucket)

    wrapped = torch.nn.parallel.DistributedDataParallel(model(seed, middle), process_group=group)
    wrapped.register_comm_hook(group, hook)
    return wrapped, count, lambda: [p.grad for p in wrapped.parameters()]


def fsdp(group, seed, middle=None):
    mesh = DeviceMesh.from_group(group, "cpu")
    encode, count = model(seed, middle), []
    for layer in encode:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(encode, mesh=mesh)
    return encode, count, lambda: [p.grad.full_tensor() for p in encode.parameters()]


class Engine(torch.nn.Module):
    """DeepSpeed's interface: it reduces at the boundary of an accumulation, in its own backward."""

    def __init__(self, module, group, count):
        super().__init__()
        self.module, self.data_parallel_group = module, group
        self.count, self.boundary = count, True

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
                dist.all_reduce(p.grad, group=self.data_parallel_group)
                p.grad /= dist.get_world_size(self.data_parallel_group)


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


class Holding(torch.nn.Identity):
    """A layer with a buffer, as every BERT has: DistributedDataParallel sends it to all ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(9))


def failing_encoder(group, seed):
    """A step whose encoder fails before its first layer on rank 1, between two that do not."""
    wrapped, _, _ = ddp(group, seed, Holding())
    own = batches(dist.get_world_size(group), seed)[dist.get_rank(group)]
    whole = GradCache(wrapped, losses.SigLIP(group=group), micro_batch_size=SIZE)
    whole.backward(*own)

    def encode(side):
        if dist.get_rank(group) == 1:
            raise ValueError("no such token")
        return wrapped(side)

    cache = GradCache(encode, losses.SigLIP(group=group), micro_batch_size=SIZE, module=wrapped)
    try:
        cache.backward(*own)
    finally:
        whole.backward(*own)


class Failing(torch.nn.Module):
    """A layer that fails at its so many-th call on rank 1."""

    def __init__(self, group, at):
        super().__init__()
        self.group, self.at, self.calls = group, at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at and dist.get_rank(self.group) == 1:
            raise ValueError("no such layer")
        return x


def failing_within(make, group, seed, at):
    """A step whose encoder fails between its layers on rank 1, and then one that does not.

    None after a failure in the second pass, which leaves part of the gradients behind.
    """
    encode, _, gradients = make(group, seed, Failing(group, at))
    parts = batches(dist.get_world_size(group), seed)
    cache = GradCache(encode, losses.SigLIP(group=group), micro_batch_size=SIZE)
    said, seconds = said_of(lambda: cache.backward(*parts[dist.get_rank(group)]))
    if at > 8:
        return said, seconds, 0.0
    encode.zero_grad()
    cache.backward(*parts[dist.get_rank(group)])
    return said, seconds, worst(gradients(), wanted(parts, seed))


def said_of(call):
    """(what it raises, seconds)."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


backends = importlib.import_module("fastsim.backends")  # fastsim.backends is a function


def verified(call):
    """A call on a device whose kernels want verdicts, which the ranks agree on: a stand-in."""

    def agree(tensors, kind, group, extras):
        return verdicts.agreed(["triton"], kind, tensors[0].dtype, torch.device("cpu"), group)

    kept, backends._verified = backends._verified, agree
    verdicts.forget()
    try:
        return call()
    finally:
        backends._verified = kept


def half_without_rows(group):
    """The loss of float16 columns whose sum is no float16, on a rank without rows too."""
    x = torch.randn(0 if dist.get_rank(group) == 1 else 2, 64).half()
    return fastsim.info_nce(x, torch.full((40, 64), 100.0).half(), group=group).item()


def refusals(group, seed):
    """What each rank says of a call that rank 1 alone refuses, and after how many seconds."""
    rank = dist.get_rank(group)
    x = torch.randn(4, 6)
    ids = torch.arange(4)
    bad = ids + 100 * (rank == 1)
    temperature = -1.0 if rank == 1 else 1.0
    wrapped, _, _ = ddp(group, seed)
    found = {}
    for name, call in {
        "temperature": lambda: fastsim.info_nce(x, x, temperature=temperature, group=group),
        "positives": lambda: fastsim.info_nce(x, x, bad, group=group),
        "exclude": lambda: fastsim.info_nce(x, x, exclude=(ids, ids[rank == 1 :]), group=group),
        "targets": lambda: fastsim.siglip(x, x, (ids, ids[rank == 1 :]), group=group),
        "matrix": lambda: fastsim.siglip(
            x, x, torch.ones(4, 4 * dist.get_world_size(group) + (rank == 1)), group=group
        ),
        "matrix of its own": lambda: fastsim.siglip(x, x, torch.ones(4, 4), group=group),
        "embeddings": lambda: fastsim.sup_con(x[0] if rank == 1 else x, ids, group=group),
        "labels": lambda: fastsim.cosent(x[:, 0], ids[rank == 1 :], group=group),
        "order": lambda: fastsim.cosent_matrix(
            x,
            x,
            torch.ones(4, 4 * dist.get_world_size(group)) * [1.0, torch.nan][rank == 1],
            group=group,
        ),
        "levels": lambda: fastsim.cosent_matrix(
            x,
            x,
            torch.ones(4, 4 * dist.get_world_size(group)),
            levels=torch.tensor([0.0, 1.0])[:: 1 if rank != 1 else 2].repeat(1 + (rank == 1)),
            group=group,
        ),
        "encoder": lambda: failing_encoder(group, seed),
        "columns": lambda: GradCache(
            wrapped, losses.SigLIP(group=group), micro_batch_size=SIZE
        ).backward(x, x if rank != 1 else 3),
        "loss": lambda: GradCache(
            wrapped, lambda x, y: fastsim.triplet_margin(x, y[rank == 1 :], y), micro_batch_size=2
        ).backward(x, x),
        # Where the ranks agree on kernels: before and after it.
        "kernels": lambda: verified(
            lambda: fastsim.sup_con(x[0] if rank == 1 else x, ids, group=group)
        ),
        "kernels, later": lambda: verified(
            lambda: fastsim.info_nce(x, x, temperature=temperature, group=group)
        ),
        "kernels, other loss": lambda: verified(
            lambda: (fastsim.siglip if rank == 1 else fastsim.info_nce)(x, x, group=group)
        ),
    }.items():
        found[name] = said_of(call)
    found["after"] = fastsim.info_nce(x, x, group=group).isfinite().item()
    return found


def learnt(group, seed):
    """The gradients of a learnt number on this rank and in one process with everything."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = batches(ranks, seed)
    found = []
    learning = (fastsim.info_nce, "temperature"), (fastsim.full_triplet, "margin")
    for (loss, name), backend in itertools.product(learning, ("cpu", "eager")):
        number = torch.tensor(0.3, requires_grad=True)
        options = {name: number, "backend": backend}
        loss(*parts[rank], group=group, **options).backward()
        own = number.grad.clone()
        number.grad = None
        loss(*torch.cat(parts, 1), **options).backward()
        found.append((own.item(), number.grad.item()))
    return found


def groups(group):
    """Modules that hold a group are copied and saved; a mesh is a group."""
    module = losses.SigLIP(group=group)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    x = torch.randn(4, 6)
    mesh = DeviceMesh.from_group(group, "cpu")
    others = copy.deepcopy(module), torch.load(saved, weights_only=False), losses.SigLIP(group=mesh)
    return [torch.equal(module(x, x), other(x, x)) for other in others]


class Learning(torch.nn.Module):
    """An encoder and a loss whose temperature it learns, of the shape that FSDP2 wants."""

    def __init__(self, group, seed):
        super().__init__()
        self.encode = model(seed)
        self.temperature = torch.nn.Parameter(torch.tensor([0.3]))
        self.group = group

    def forward(self, sides):
        vectors = map(self.encode, sides)
        return fastsim.info_nce(*vectors, temperature=self.temperature, group=self.group)


def sharded_with_its_loss(group, seed):
    """The error of the gradients, the temperature's among them, of a model in FSDP2."""
    parts = batches(dist.get_world_size(group), seed)
    one = Learning(None, seed)
    one(torch.cat(parts, 1)).backward()
    several = fully_shard(Learning(group, seed), mesh=DeviceMesh.from_group(group, "cpu"))
    several(parts[dist.get_rank(group)]).backward()
    gradients = [p.grad.full_tensor() for p in several.parameters()]
    return worst(gradients, [p.grad for p in one.parameters()])


def sharded_loss(group, seed):
    """What GradCache says of a loss whose temperature is sharded."""
    loss = losses.InfoNCE(temperature=torch.nn.Parameter(torch.tensor([0.3])), group=group)
    fully_shard(loss, mesh=DeviceMesh.from_group(group, "cpu"))
    cache = GradCache(model(seed), loss, micro_batch_size=SIZE)
    return said_of(lambda: cache.backward(torch.randn(4, 6), torch.randn(4, 6)))[0]


ROW_IDS = torch.arange(11) // 2
# name -> (loss of x and y, whose rows are sharded; learnt numbers)
SHARDED = {
    "info_nce": (lambda x, y, ids, **o: fastsim.info_nce(x, y, **o), {"temperature": 0.3}),
    "symmetric": (
        lambda x, y, ids, **o: fastsim.info_nce(
            x, y, symmetric=True, exclude=(ids, ids), reduction="sum", **o
        ),
        {"temperature": 0.3},
    ),
    "rows": (
        lambda x, y, ids, **o: fastsim.siglip(x, y, reduction="none", **o),
        {"scale": 3.0, "bias": -1.0},
    ),
    "by name": (lambda x, y, ids: losses.InfoNCE()(anchors=x, candidates=y), {}),
    "groups": (lambda x, y, ids, **o: fastsim.sup_con(x, ids, **o), {"temperature": 0.3}),
    "triplet": (
        lambda x, y, ids, **o: fastsim.full_triplet(x, y, exclude=(ids, ids), **o),
        {"margin": 0.3},
    ),
    "matrix": (
        lambda x, y, ids, **o: fastsim.cosent_matrix(x, y, (ids, ids), **o),
        {"scale": 3.0},
    ),
    "hardest": (lambda x, y, ids: fastsim.hardest_pairs(x, ids).negative, {}),
}


def dtensors(group, seed):
    """{loss: the largest error of its value and gradients}, of replicas and of sharded rows."""
    generator = fresh(seed)
    x, y = torch.randn(2, 11, 6, generator=generator)  # 11 rows: no multiple of the ranks
    mesh, found = DeviceMesh.from_group(group, "cpu"), {}
    for name, (loss, learnt) in SHARDED.items():
        truth = [t.clone().requires_grad_() for t in (x, y)]
        numbers = {key: torch.tensor(value, requires_grad=True) for key, value in learnt.items()}
        value = loss(*truth, ROW_IDS, **numbers)
        value.sum().backward()
        for placement in (Shard(0), Replicate()):
            sides = [distribute_tensor(t, mesh, [placement]).requires_grad_() for t in (x, y)]
            own = {key: torch.tensor(number, requires_grad=True) for key, number in learnt.items()}
            ids = distribute_tensor(ROW_IDS, mesh, [placement])
            got = loss(*sides, ids, **own)
            got.sum().backward()
            pairs = [(got.full_tensor(), value)]
            pairs += [
                (side.grad.full_tensor(), t.grad)
                for side, t in zip(sides, truth, strict=True)
                if t.grad is not None
            ]
            pairs += [(own[key].grad, numbers[key].grad) for key in learnt]
            found[name, str(placement)] = worst(*zip(*pairs, strict=True))
    return found


def dtensor_refusals(group):
    """What is said of DTensors that cannot be served."""
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.randn(8, 6)
    rows, columns, replica = (distribute_tensor(x, mesh, [p]) for p in PLACEMENTS)
    more = distribute_tensor(torch.randn(10, 6), mesh, [Shard(0)])
    places = distribute_tensor(torch.arange(8), mesh, [Shard(0)])
    return {
        name: said_of(call)[0]
        for name, call in {
            "columns": lambda: fastsim.info_nce(columns, columns),
            "replica beside rows": lambda: fastsim.info_nce(rows, replica),
            "plain beside rows": lambda: fastsim.info_nce(rows, x),
            "more columns": lambda: fastsim.info_nce(rows, more),
            "positives": lambda: fastsim.info_nce(rows, rows, places),
            "no group": lambda: fastsim.cosine_regression(rows, rows, torch.ones(8)),
            "another group": lambda: fastsim.info_nce(rows, rows, group=dist.group.WORLD),
            "scores": lambda: fastsim.cosine_similarity(rows),
        }.items()
    }


PLACEMENTS = Shard(0), Shard(1), Replicate()


def everything(group, seed):
    """All of the above on this rank of a group."""
    makes = (ddp, function_around_ddp, fsdp, deepspeed)
    found = {make.__name__: step_of(make, group, seed) for make in makes}
    # In the first pass and in the second, of which each has eight calls on a rank.
    found["failing"] = {
        (make.__name__, at): failing_within(make, group, seed, at)
        for make in (ddp, fsdp)
        for at in (2, 12)
    }
    found["no rows"] = step_of(ddp, group, seed, rows=(16, 0, 9))[0]
    found["half without rows"] = half_without_rows(group)
    found["refusals"] = refusals(group, seed)
    found["learnt"] = learnt(group, seed)
    found["groups"] = groups(group)
    found["sharded with its loss"] = sharded_with_its_loss(group, seed)
    found["sharded loss"] = sharded_loss(group, seed)
    found["dtensors"] = dtensors(group, seed)
    found["dtensor refusals"] = dtensor_refusals(group)
    return found

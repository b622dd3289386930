"""What test_deepspeed.py runs on each of two processes."""

import copy
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3, stage_1_and_2

import fastsim
from fastsim import losses
from fastsim.grad_cache import GradCache
from tests.distributed.wrappers import batches, model, worst

# It would compile an exchange through shared memory; gloo does without.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


def step(stage, accumulate=1):
    """(error of a step of SGD with rate 1, gradient reductions)."""
    encode = model(7)
    one = copy.deepcopy(encode)
    engine, *_ = deepspeed.initialize(
        model=encode,
        optimizer=torch.optim.SGD(encode.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )
    rank, reductions, kept = dist.get_rank(), [], {}
    reducers = [
        (stage_1_and_2.DeepSpeedZeroOptimizer, "average_tensor"),
        (stage3.DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"),
    ]
    for kind, name in reducers:
        kept[kind] = plain = getattr(kind, name)

        def counted(*arguments, plain=plain, **options):
            reductions.append(1)
            return plain(*arguments, **options)

        setattr(kind, name, counted)
    cache = GradCache(engine, losses.SigLIP(group=dist.group.WORLD), micro_batch_size=4)
    try:
        for part in range(accumulate):
            columns = batches(2, 7 + part)
            cache.backward(*columns[rank], scale=lambda loss: loss / accumulate)
            engine.step()
            whole = fastsim.siglip(*(one(side) for side in torch.cat(columns, 1)))
            (whole / accumulate).backward()
    finally:
        for kind, name in reducers:
            setattr(kind, name, kept[kind])
    before = [p.detach().clone() for p in one.parameters()]
    parameters = list(encode.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        moved = [b - p.detach() for b, p in zip(before, parameters, strict=True)]
    return worst(moved, [p.grad for p in one.parameters()]), len(reductions)


if __name__ == "__main__":
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = {stage: step(stage) for stage in (1, 2, 3)}
    found["accumulated"] = max(step(stage, accumulate=2)[0] for stage in (1, 2, 3))
    torch.save(found, f"{sys.argv[1]}/{dist.get_rank()}.pt")

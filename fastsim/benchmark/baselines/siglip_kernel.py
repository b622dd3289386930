"""siglip-kernel: SigLIP of pairs and of groups, on a GPU without the N x N matrix."""

import math

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.baselines.baseline import Baseline, gpu_or_interpreted, interpreted


def _package():
    if interpreted():  # the package reads the generation of the GPU when it is imported
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
    import siglip_kernel

    return siglip_kernel


def _numbers(problem):
    device = problem.leaves[0].device
    log_scale = torch.tensor(math.log(problem.options["scale"]), device=device)
    return log_scale, torch.tensor(problem.options["bias"], device=device)


def siglip(problem):
    # By default it uses kernels that the interpreter cannot run.
    options = {"backend": "chunked_bf16"} if interpreted() else {}
    loss, numbers = _package().fused_siglip_loss, _numbers(problem)
    return lambda x, y: loss(normalize(x, dim=1), normalize(y, dim=1), *numbers, **options)


def grouped_siglip(problem):
    """The package's kernel of groups, with weight 1 for every pair and the sum divided by N.

    By default the package gives positives less weight.
    """
    _package()
    from siglip_kernel.fused_siglip_plus import FusedSigLIPPlus

    numbers, ((rows, columns),) = _numbers(problem), problem.arguments
    ones = torch.ones(problem.rows, device=rows.device)
    share, soft_label, chunk_size = 0.5, False, 0
    options = rows, columns, ones, ones, share, share, soft_label, chunk_size, 1 / problem.rows

    def call(x, y):
        return FusedSigLIPPlus.apply(normalize(x, dim=1), normalize(y, dim=1), *numbers, *options)

    return call


def weighed_siglip(problem):
    """The package's loss of groups, times M: it divides by all pairs, fastsim by the rows."""
    _package()
    from siglip_kernel import fused_siglip_plus_loss

    numbers, (groups,) = _numbers(problem), problem.arguments

    def call(x, y):
        loss = fused_siglip_plus_loss(normalize(x, dim=1), normalize(y, dim=1), *numbers, *groups)
        return loss * len(y)

    return call


BASELINE = Baseline(
    "siglip-kernel",
    "siglip_kernel",
    {"siglip": siglip, "siglip groups": grouped_siglip, "siglip weighed": weighed_siglip},
    gpu_or_interpreted,
)

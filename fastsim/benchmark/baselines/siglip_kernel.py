"""siglip-kernel: SigLIP on a GPU without the N x N matrix."""

import math

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.baselines.baseline import Baseline, gpu_only


def siglip(problem):
    from siglip_kernel import fused_siglip_loss

    device = problem.leaves[0].device
    log_scale = torch.tensor(math.log(problem.options["scale"]), device=device)
    bias = torch.tensor(problem.options["bias"], device=device)
    return lambda x, y: fused_siglip_loss(normalize(x, dim=1), normalize(y, dim=1), log_scale, bias)


BASELINE = Baseline("siglip-kernel", "siglip_kernel", {"siglip": siglip}, gpu_only)

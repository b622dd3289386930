"""Inf-CL: InfoNCE on a GPU, tile by tile; each call computes one direction."""

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.baselines.baseline import Baseline, UnavailableError, gpu_only

HEAD = 256  # the library splits the width into heads of this size


def _loss(problem):
    from inf_cl import cal_inf_loss

    width = problem.leaves[0].shape[1]
    head = HEAD if width % HEAD == 0 else 128
    if width % head:
        raise UnavailableError(f"it serves widths that 128 divides, not {width}")
    scale = torch.tensor(1 / problem.options["temperature"], device=problem.leaves[0].device)
    return lambda x, y: cal_inf_loss(x, y, scale=scale, head_dim=head)


def info_nce(problem):
    loss = _loss(problem)
    return lambda x, y: loss(normalize(x, dim=1), normalize(y, dim=1))


def symmetric_info_nce(problem):
    loss = _loss(problem)

    def call(x, y):
        x, y = normalize(x, dim=1), normalize(y, dim=1)
        return (loss(x, y) + loss(y, x)) / 2

    return call


BASELINE = Baseline(
    "inf-cl",
    "inf_cl",
    {"info_nce": info_nce, "info_nce symmetric": symmetric_info_nce},
    gpu_only,
)

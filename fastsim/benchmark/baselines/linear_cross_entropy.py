"""torch's chunked linear cross entropy (2.13): InfoNCE with the candidates as the weights."""

import torch
from torch.nn import functional

from fastsim.benchmark.baselines.baseline import Baseline, UnavailableError


def info_nce(problem):
    if not hasattr(functional, "linear_cross_entropy"):
        raise UnavailableError(f"torch {torch.__version__} has no linear_cross_entropy")
    scale = 1 / problem.options["temperature"]
    options = torch.nn.LinearCrossEntropyOptions()
    labels = torch.arange(problem.rows, device=problem.leaves[0].device)
    unit = functional.normalize

    def call(x, y):
        return functional.linear_cross_entropy(
            unit(x, dim=1) * scale, unit(y, dim=1), labels, options=options
        )

    return call


BASELINE = Baseline("torch linear_cross_entropy", "torch", {"info_nce": info_nce}, up_to=8192)

"""How exact a loss and its gradients are, against the dense formula in float64."""

import torch

from fastsim.benchmark.baselines import ours
from fastsim.benchmark.calls import step


def errors(call, problem):
    """{"loss error", "gradient error"} relative to float64: |l - t| / |t|, largest |g - t| / |t|.

    The norm is that of all entries; of several gradients the worst one counts.
    """
    truth = problem.to(torch.float64)
    wanted = step(ours("eager").call(truth), truth)
    found = step(call, problem)
    return {
        "loss error": relative(found, wanted),
        "gradient error": max(
            relative(mine.grad, exact.grad)
            for mine, exact in zip(problem.leaves, truth.leaves, strict=True)
        ),
    }


def relative(found, wanted):
    """|found - wanted| / |wanted| in norm, or |found| where nothing is wanted."""
    wanted = wanted.double()  # a float32 norm of tiny gradients is 0
    distance = (found.double() - wanted).norm()
    return (distance / wanted.norm()).item() if wanted.any() else distance.item()

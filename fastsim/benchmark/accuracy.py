"""The errors of a loss and its gradients, relative to the dense formula in float64."""

import torch

from fastsim.benchmark.baselines import ours
from fastsim.benchmark.calls import step


def errors(call, problem):
    """{"loss error": |l - t| / |t|, "gradient error": the largest |g - t| / |t|}.

    t is the float64 value of the loss l or of a gradient g, and |t| the norm over all entries.
    """
    truth = problem.to(torch.float64)
    exact_loss = step(ours("eager").call(truth), truth)
    loss = step(call, problem)
    return {
        "loss error": relative(loss, exact_loss),
        "gradient error": max(
            relative(leaf.grad, exact.grad)
            for leaf, exact in zip(problem.leaves, truth.leaves, strict=True)
        ),
    }


def relative(value, exact):
    """|value - exact| / |exact| in norm, or |value| if exact is 0."""
    exact = exact.double()  # a float32 norm of tiny gradients is 0
    distance = (value.double() - exact).norm()
    return (distance / exact.norm()).item() if exact.any() else distance.item()

"""One call of a loss: with its gradients, without, and what it says when it cannot."""

import torch

from fastsim.benchmark.baselines.baseline import UnavailableError

PASSES = ("forward", "forward + backward")
# How torch and the C++ library say that there is no memory left.
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "not enough memory")


def value(call, problem):
    """The loss, in the context that the problem is in."""
    if problem.autocast is None:  # entering one is a share of a small loss's time
        return call(*problem.leaves)
    with torch.autocast(problem.leaves[0].device.type, problem.autocast):
        return call(*problem.leaves)


def step(call, problem):
    """The loss and its gradients, in the `grad` of the leaves."""
    for leaf in problem.leaves:
        leaf.grad = None
    loss = value(call, problem)
    loss.backward()
    return loss.detach()


def runnable(call, problem, which):
    """A function of nothing that does one pass and waits for its device."""
    wait = torch.cuda.synchronize if problem.leaves[0].is_cuda else _nothing

    def forward():
        with torch.no_grad():
            value(call, problem)
        wait()

    def both():
        step(call, problem)
        wait()

    return both if which == "forward + backward" else forward


def _nothing():
    pass


def reason(error):
    """Why a call failed, in one line for a row of results."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UnavailableError):
        return text
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
        return "out of memory"
    return f"{type(error).__name__}: {text}"[:200]

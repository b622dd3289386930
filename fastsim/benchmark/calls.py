"""One call of a loss, with or without its gradients, and the reason if it fails."""

import torch

from fastsim.benchmark.baselines.baseline import UnavailableError

PASSES = ("forward", "forward + backward")
# Parts of the messages with which torch and the C++ library report that memory ran out.
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "not enough memory")


def value(call, problem):
    """The loss, computed under the problem's autocast."""
    if problem.autocast is None:  # entering a context takes a share of a small loss's time
        return call(*problem.leaves)
    with torch.autocast(problem.leaves[0].device.type, problem.autocast):
        return call(*problem.leaves)


def step(call, problem):
    """The loss; its gradients are in the `grad` of the leaves."""
    for leaf in problem.leaves:
        leaf.grad = None
    loss = value(call, problem)
    loss.backward()
    return loss.detach()


def runnable(call, problem, which):
    """A function without arguments that does one pass and waits for its device.

    which: one of `PASSES`.
    """
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
    """The reason why a call failed, as one line for a result row."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, UnavailableError):
        return text
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY):
        return "out of memory"
    return f"{type(error).__name__}: {text}"[:200]

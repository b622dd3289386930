"""The record of a baseline, and the devices that it serves."""

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class UnavailableError(Exception):
    """A baseline cannot compute this problem on this machine; the message is one sentence why."""


def anywhere(problem):
    """`unsupported_reason` of a baseline that serves every device."""
    return None


def gpu_only(problem):
    """`unsupported_reason` of a baseline that has kernels for GPUs alone."""
    return None if problem.leaves[0].is_cuda else "it serves a GPU only"


def interpreted():
    """Whether Triton's interpreter runs the kernels of this process, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_or_interpreted(problem):
    """`unsupported_reason` of a baseline in Triton that the interpreter runs too."""
    return None if interpreted() else gpu_only(problem)


@dataclass(frozen=True)
class Baseline:
    """The losses of one implementation.

    losses: {case name: make}; make(problem) imports what it needs and returns a function
        call(*leaves) -> loss.
    unsupported_reason: a function of a problem; None, or a sentence why it cannot be served.
    up_to: the largest N that is measured unless the user names the baseline or the sizes.
    drop_in: as `losses`, with fastsim's drop-in losses in place of the package's, if there are any.
    """

    name: str
    package: str
    losses: Mapping[str, Callable]
    unsupported_reason: Callable = anywhere
    up_to: int | None = None
    drop_in: Mapping[str, Callable] = field(default_factory=dict)

    def call(self, problem):
        """A function call(*leaves) -> loss for this problem; UnavailableError if there is none."""
        if importlib.util.find_spec(self.package) is None:
            raise UnavailableError(f"{self.package} is not installed")
        reason = self.unsupported_reason(problem)
        if reason is not None:
            raise UnavailableError(reason)
        return self.losses[problem.case.name](problem)


def with_library(losses, library):
    """{loss: make(problem)} from {loss: make(library, problem)}.

    library: a function without arguments that imports and returns the module with the losses.
    """
    return {name: functools.partial(make, library) for name, make in losses.items()}

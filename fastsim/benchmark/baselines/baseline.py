"""What a baseline is."""

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class UnavailableError(Exception):
    """A baseline that does not compute this here; the message says why, in one sentence."""


def anywhere(problem):
    """`unsupported_reason` of a baseline that serves every device."""
    return None


def gpu_only(problem):
    """`unsupported_reason` of a baseline whose kernels are a GPU's."""
    return None if problem.leaves[0].is_cuda else "it serves a GPU only"


def interpreted():
    """Whether Triton's interpreter runs kernels, on the processor, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_or_interpreted(problem):
    """`unsupported_reason` of a baseline in Triton that its interpreter runs too."""
    return None if interpreted() else gpu_only(problem)


@dataclass(frozen=True)
class Baseline:
    """Losses by one implementation.

    losses: name of a case -> make(problem) -> call(*leaves) -> loss. make imports what it needs.
    unsupported_reason: problem -> None, or a sentence that says why it cannot be served.
    up_to: beyond this N it is left out of a run that does not ask for it, to keep that short.
    drop_in: the same with fastsim's module in place of the package's losses, where there is one.
    """

    name: str
    package: str
    losses: Mapping[str, Callable]
    unsupported_reason: Callable = anywhere
    up_to: int | None = None
    drop_in: Mapping[str, Callable] = field(default_factory=dict)

    def call(self, problem):
        """call(*leaves) -> loss of this problem; UnavailableError where there is none."""
        if importlib.util.find_spec(self.package) is None:
            raise UnavailableError(f"{self.package} is not installed")
        reason = self.unsupported_reason(problem)
        if reason is not None:
            raise UnavailableError(reason)
        return self.losses[problem.case.name](problem)


def made(losses, library):
    """{loss: make(problem)} of {loss: make(library, problem)}; library() gives the losses."""
    return {name: functools.partial(make, library) for name, make in losses.items()}

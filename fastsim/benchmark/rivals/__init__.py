"""Who computes a loss: fastsim's backends and what a user would pick instead.

To add a rival: a file here with a `Rival`, named in `_RIVALS`.
"""

import fastsim
from fastsim.backends import backends, get
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.rivals import (
    compiled,
    cut_cross_entropy,
    eager,
    inf_cl,
    linear_cross_entropy,
    open_clip,
    pytorch_metric_learning,
    sentence_transformers,
    siglip_kernel,
)
from fastsim.benchmark.rivals.rival import Rival

_RIVALS = (
    eager.RIVAL,
    compiled.RIVAL,
    linear_cross_entropy.RIVAL,
    sentence_transformers.RIVAL,
    sentence_transformers.CACHED,
    open_clip.RIVAL,
    pytorch_metric_learning.RIVAL,
    pytorch_metric_learning.NT_XENT,
    siglip_kernel.RIVAL,
    inf_cl.RIVAL,
    cut_cross_entropy.RIVAL,
)
RIVALS = {rival.name: rival for rival in _RIVALS}


def ours(backend):
    """A backend of fastsim, as one among rivals."""

    def make(problem):
        function, given, options = problem.case.function, problem.given, dict(problem.options)
        if function is not fastsim.triplet_margin:  # which has no choice of backends
            options["backend"] = backend
        return lambda *leaves: function(*leaves, *given, **options)

    def serves(problem):
        return backends()[backend] or get(backend).objection(*problem.leaves)

    return Rival(f"fastsim {backend}", "fastsim", dict.fromkeys(CASES, make), serves)


def rival_named(name):
    """The rival of that name, a backend of fastsim as "fastsim <backend>"."""
    return RIVALS[name] if name in RIVALS else ours(name.removeprefix("fastsim "))

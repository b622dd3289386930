"""The implementations of a loss: fastsim's backends, and what a user would pick instead.

To add a baseline, add a file with a `Baseline` here and name it in `_BASELINES`.
"""

import fastsim
from fastsim.backends import backends, get
from fastsim.benchmark.baselines import (
    compiled,
    cut_cross_entropy,
    eager,
    inf_cl,
    linear_cross_entropy,
    memeff,
    open_clip,
    pytorch_metric_learning,
    sentence_transformers,
    siglip_kernel,
)
from fastsim.benchmark.baselines.baseline import Baseline
from fastsim.benchmark.cases import CASES

_BASELINES = (
    eager.BASELINE,
    compiled.BASELINE,
    linear_cross_entropy.BASELINE,
    sentence_transformers.BASELINE,
    sentence_transformers.CACHED,
    open_clip.BASELINE,
    pytorch_metric_learning.BASELINE,
    pytorch_metric_learning.NT_XENT,
    siglip_kernel.BASELINE,
    memeff.BASELINE,
    inf_cl.BASELINE,
    cut_cross_entropy.BASELINE,
)
BASELINES = {baseline.name: baseline for baseline in _BASELINES}


def ours(backend):
    """A backend of fastsim as a `Baseline`."""

    def make(problem):
        function, arguments = problem.case.function, problem.arguments
        options = dict(problem.options)
        if function is not fastsim.triplet_margin:  # it takes no backend
            options["backend"] = backend
        return lambda *leaves: function(*leaves, *arguments, **options)

    def serves(problem):
        return backends()[backend] or get(backend).unsupported_reason(*problem.leaves)

    return Baseline(f"fastsim {backend}", "fastsim", dict.fromkeys(CASES, make), serves)


def baseline_named(name):
    """The baseline of that name; "fastsim <backend>" names a backend of fastsim."""
    return BASELINES[name] if name in BASELINES else ours(name.removeprefix("fastsim "))

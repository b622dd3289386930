"""The losses of open_clip, on normalised features."""

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.baselines.baseline import Baseline, with_library
from fastsim.precision import compute_dtype


def theirs():
    """The module with the package's losses."""
    from fastsim.integrations.open_clip import peer

    return peer.losses()


def drop_in():
    """The module with fastsim's drop-in losses."""
    from fastsim.integrations import open_clip

    return open_clip


def _scalar(problem, value):
    """A learnt scalar as a trainer holds it: float32, or float64 for float64 features."""
    leaf = problem.leaves[0]
    dtype = compute_dtype(leaf)
    return torch.tensor(value, device=leaf.device, dtype=dtype)


def symmetric_info_nce(library, problem):
    loss = library().ClipLoss()
    scale = _scalar(problem, 1 / problem.options["temperature"])
    return lambda x, y: loss(normalize(x, dim=1), normalize(y, dim=1), scale)


def siglip(library, problem):
    loss = library().SigLipLoss()
    scale, bias = (_scalar(problem, problem.options[name]) for name in ("scale", "bias"))
    return lambda x, y: loss(normalize(x, dim=1), normalize(y, dim=1), scale, bias)


_LOSSES = {"info_nce symmetric": symmetric_info_nce, "siglip": siglip}

BASELINE = Baseline(
    "open_clip", "open_clip", with_library(_LOSSES, theirs), drop_in=with_library(_LOSSES, drop_in)
)

"""open_clip's losses on normalised features."""

import functools
import importlib.util
import sys

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.baselines.baseline import Baseline, made


@functools.cache
def theirs():
    """open_clip.loss alone: its package imports torchvision, which the losses do not need."""
    if "open_clip" in sys.modules:
        return sys.modules["open_clip"].loss
    folder = importlib.util.find_spec("open_clip").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("open_clip_loss", f"{folder}/loss.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def drop_in():
    from fastsim.integrations import open_clip

    return open_clip


def _scalar(problem, value):
    """A learnt scalar as a trainer holds it: float32, for float64 features float64."""
    leaf = problem.leaves[0]
    dtype = torch.promote_types(leaf.dtype, torch.float32)
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

BASELINE = Baseline("open_clip", "open_clip", made(_LOSSES, theirs), drop_in=made(_LOSSES, drop_in))

"""Losses of pytorch-metric-learning without their N x N and N x C matrices: change the import.

    from fastsim.integrations.pytorch_metric_learning import losses, miners

`losses` has NTXentLoss, SupConLoss, MultiSimilarityLoss, CircleLoss, TripletMarginLoss,
CrossBatchMemory, NormalizedSoftmaxLoss, CosFaceLoss, ArcFaceLoss, ProxyNCALoss and ProxyAnchorLoss,
`miners` has BatchHardMiner. Every other name, such as `distances` and `reducers`, is that of
pytorch-metric-learning. These are subclasses of the classes of version 2.9, with their arguments,
defaults, reducers, regularizers and results. If an option has no fused form, or a method of theirs
has been replaced, the code of pytorch-metric-learning computes the loss, and a warning says so
once.
"""

import importlib

import pytorch_metric_learning as theirs

from fastsim.integrations.pytorch_metric_learning import losses, miners

_SIBLINGS = ("datasets", "distances", "reducers", "regularizers", "samplers", "testers")
_SIBLINGS += ("trainers", "utils")

__all__ = ["losses", "miners"]


def __getattr__(name):
    if name in _SIBLINGS:
        return importlib.import_module(f"pytorch_metric_learning.{name}")
    if not name.startswith("__") and hasattr(theirs, name):
        return getattr(theirs, name)
    raise AttributeError(f"neither {__name__} nor {theirs.__name__} has {name!r}")


def __dir__():
    return sorted({*globals(), *_SIBLINGS})

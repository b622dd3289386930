"""Tevatron's in-batch losses without the score matrix: change the import alone.

    from fastsim.integrations.tevatron import SimpleContrastiveLoss, DistributedContrastiveLoss

Subclasses of tevatron.loss's classes, of version 0.1 or of its repository, with their arguments and
results: the cross entropy of each query's products with all passages. A query's own passage is
every n_target-th, or without that option, at even steps. Tevatron's code computes the loss where
targets are probabilities, and where a loss has further attributes, such as a temperature, or a
replaced method; a warning says so once.
"""

import torch
from tevatron import loss as theirs

from fastsim.checks import INTEGRAL, can_be_read
from fastsim.integrations import names
from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.overrides import Hooked, say_once
from fastsim.integrations.products import cross_entropy
from fastsim.pairs import as_ids
from fastsim.scores import compute_dtype

IGNORED = -100  # a target that torch's cross entropy leaves out

# What theirs have; another attribute is an option that the fused form does not know.
ATTRIBUTES = {"target_per_qry", "word_size", "world_size", "rank", "scale_loss"}

_TheirLoss = theirs.SimpleContrastiveLoss
_their_call = _TheirLoss.__call__


class SimpleContrastiveLoss(Hooked, theirs.SimpleContrastiveLoss, hooks=()):
    """Of queries x (N, D) and passages y (M, D); target (N,): the place of each query's own."""

    def __call__(self, x, y, target=None, reduction="mean"):
        reason = _unfused(self, x, y, target)
        if reason is not None:
            say_once(self, f"{reason} no fused form", "tevatron", stacklevel=3)
        if reason is not None or len(x) == 0:
            return super().__call__(x, y, target=target, reduction=reduction)
        if target is None:
            step = getattr(self, "target_per_qry", None)
            if step is None:  # not of version 0.1
                step = len(y) // len(x)
            elif len(x) * step != len(y):
                raise ValueError(
                    f"y: wanted {len(x) * step} passages, {step} of each query, got {len(y)}"
                )
            target, ignored = torch.arange(0, len(x) * step, step, device=x.device), None
        else:
            target, ignored = _split(as_ids(target))
        given = {"reduction": reduction, "names": ("x", "y", "target")}
        if ignored is not None and reduction != "none":
            given["weights"] = _weights(ignored, reduction, compute_dtype(x))
        loss = cross_entropy(x, y, target, 1.0, **given)
        if ignored is not None:
            loss = _without(ignored, loss, reduction)

        def few():
            sides = x.detach()[:2], y.detach()[:2]
            return _their_call(_TheirLoss(), *sides, torch.zeros_like(target[:2]))

        return as_theirs(loss, _TheirLoss, few, x, y)


def _unfused(loss, x, y, target):
    """What has no fused form, with its verb, or None."""
    changed = loss.replaced_hook() or min(vars(loss).keys() - ATTRIBUTES, default=None)
    if changed is not None:
        return f"{changed} has"
    if target is not None and target.dtype not in INTEGRAL:
        return f"a target of {target.dtype} has"
    return None if x.dtype == y.dtype else f"x of {x.dtype} against y of {y.dtype} has"


def _split(target):
    """(targets, those of ignored queries being 0; which these are, None where there are none).

    Off the CPU nothing is read, as that would wait for the device.
    """
    ignored = target == IGNORED
    if can_be_read(target) and not ignored.any():
        return target, None
    return target.masked_fill(ignored, 0), ignored


def _weights(ignored, reduction, dtype):
    """Of the queries' losses in the sum, or the mean over those that are not ignored."""
    kept = (~ignored).to(dtype)
    return kept / kept.sum().clamp(min=1) if reduction == "mean" else kept


def _without(ignored, loss, reduction):
    """The loss, 0 for each ignored query; the mean of none is NaN. Neither has a gradient."""
    if reduction == "mean":
        return loss.masked_fill(ignored.all(), torch.nan)
    return loss.masked_fill(ignored, 0.0) if reduction == "none" else loss


class DistributedContrastiveLoss(theirs.DistributedContrastiveLoss, SimpleContrastiveLoss):
    """The same of the queries and passages of all processes, gathered by their code."""


__getattr__, __dir__, __all__ = names.served(__name__, theirs)

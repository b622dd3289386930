"""Tevatron's in-batch losses without the score matrix: change the import alone.

    from fastsim.integrations.tevatron import SimpleContrastiveLoss, DistributedContrastiveLoss

Subclasses of the classes in tevatron.loss (version 0.1, or of the repository), with their arguments
and results: the cross entropy of each query's dot products with all passages. The passages of a
query are consecutive, its positive first. Tevatron's code computes the loss if targets are
probabilities, if a loss has further attributes, such as a temperature, or if a method has been
replaced; a warning says so once.
"""

import torch
from tevatron import loss as theirs

from fastsim.checks import INTEGRAL, can_be_read
from fastsim.integrations import names
from fastsim.integrations.dtypes import in_their_dtype
from fastsim.integrations.overrides import Hooked, no_fused_form
from fastsim.integrations.products import cross_entropy
from fastsim.pairs import as_ids
from fastsim.precision import compute_dtype

IGNORED = -100  # a target that torch's cross entropy leaves out

# The attributes of theirs. Any other is an option that the fused form does not know.
ATTRIBUTES = {"target_per_qry", "word_size", "world_size", "rank", "scale_loss"}

_TheirLoss = theirs.SimpleContrastiveLoss
_their_call = _TheirLoss.__call__


class SimpleContrastiveLoss(Hooked, theirs.SimpleContrastiveLoss, hooks=()):
    """Queries x (N, D), passages y (M, D); target (N,): the column of each query's positive."""

    _package = "tevatron"

    def __call__(self, x, y, target=None, reduction="mean"):
        if self.is_unfused(x, y, target) or len(x) == 0:
            return super().__call__(x, y, target=target, reduction=reduction)
        if target is None:
            step = getattr(self, "target_per_qry", None)
            if step is None:  # the repository's class, which has no such option
                step = len(y) // len(x)
            elif len(x) * step != len(y):
                raise ValueError(
                    f"y: wanted {len(x) * step} passages, {step} per query, got {len(y)}"
                )
            target, ignored = torch.arange(0, len(x) * step, step, device=x.device), None
        else:
            target, ignored = _split(as_ids(target))
        options = {"reduction": reduction, "names": ("x", "y", "target")}
        if ignored is not None and reduction != "none":
            options["weights"] = _weights(ignored, reduction, compute_dtype(x))
        loss = cross_entropy(x, y, target, 1.0, **options)
        if ignored is not None:
            loss = _without(ignored, loss, reduction)

        def theirs_on_two_rows():
            sides = x.detach()[:2], y.detach()[:2]
            return _their_call(_TheirLoss(), *sides, torch.zeros_like(target[:2]))

        return in_their_dtype(loss, _TheirLoss, theirs_on_two_rows, x, y)

    def unfused_reason(self, x, y, target):
        reason = super().unfused_reason()
        if reason is not None:
            return reason
        options = vars(self).keys() - ATTRIBUTES
        if options:
            return no_fused_form(min(options))
        if target is not None and target.dtype not in INTEGRAL:
            return no_fused_form(f"a target of {target.dtype}")
        if x.dtype != y.dtype:
            return no_fused_form(f"x of {x.dtype} against y of {y.dtype}")
        return None


def _split(target):
    """(targets, with 0 for ignored queries; the mask of these queries, or None if there are none).

    Off the CPU there is always a mask: to look for none would wait for the device.
    """
    ignored = target == IGNORED
    if can_be_read(target) and not ignored.any():
        return target, None
    return target.masked_fill(ignored, 0), ignored


def _weights(ignored, reduction, dtype):
    """The weights of the queries' losses in the sum, or in the mean over those not ignored."""
    kept = (~ignored).to(dtype)
    return kept / kept.sum().clamp(min=1) if reduction == "mean" else kept


def _without(ignored, loss, reduction):
    """The loss with 0 for ignored queries; NaN for a mean over none. Neither has a gradient."""
    if reduction == "mean":
        return loss.masked_fill(ignored.all(), torch.nan)
    return loss.masked_fill(ignored, 0.0) if reduction == "none" else loss


class DistributedContrastiveLoss(theirs.DistributedContrastiveLoss, SimpleContrastiveLoss):
    """The loss of the queries and passages of all processes, gathered by their code."""


__getattr__, __dir__, __all__ = names.forwarding(__name__, theirs)

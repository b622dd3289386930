"""Tevatron's in-batch losses without the score matrix: change the import alone.

    from fastsim.integrations.tevatron import SimpleContrastiveLoss, DistributedContrastiveLoss

Subclasses of tevatron.loss's classes, of version 0.1, with their arguments and results: the cross
entropy of each query's products with all passages, its own being every n_target-th.
"""

import torch
from tevatron import loss as theirs

from fastsim.integrations import names
from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.products import cross_entropy

_TheirLoss = theirs.SimpleContrastiveLoss
_their_call = _TheirLoss.__call__


class SimpleContrastiveLoss(theirs.SimpleContrastiveLoss):
    """Of queries x (N, D) and passages y (M, D); target (N,): the place of each query's own."""

    def __call__(self, x, y, target=None, reduction="mean"):
        if len(x) == 0:
            return super().__call__(x, y, target=target, reduction=reduction)
        if target is None:
            if len(x) * self.target_per_qry != len(y):
                raise ValueError(
                    f"y: wanted {len(x) * self.target_per_qry} passages, {self.target_per_qry}"
                    f" of each query, got {len(y)}"
                )
            target = torch.arange(0, len(y), self.target_per_qry, device=x.device)
        loss = cross_entropy(x, y, target, 1.0, reduction=reduction)

        def few():
            sides = x.detach()[:2], y.detach()[:2]
            return _their_call(_TheirLoss(), *sides, torch.zeros_like(target[:2]))

        return as_theirs(loss, _TheirLoss, few, x, y)


class DistributedContrastiveLoss(theirs.DistributedContrastiveLoss, SimpleContrastiveLoss):
    """The same of the queries and passages of all processes, gathered by their code."""


__getattr__, __dir__, __all__ = names.served(__name__, theirs)

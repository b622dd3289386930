"""The contrastive losses of lightly without their matrices: change the import alone.

    from fastsim.integrations.lightly import DCLLoss, DCLWLoss, NTXentLoss

Each is a subclass of lightly's class of that name, 1.5.21 or later (DCLLoss of earlier ones is
another sum), with its arguments, defaults and results; every other name is that of lightly.loss.
Where a method or module of theirs was replaced, lightly's code computes the loss, and a warning
says so once.

    NTXentLoss  over both views: log sum_{j != i} exp(z_ij) - z_{i, other view},
                z = cos / temperature; with a memory bank j is the other view and the bank's
    DCLLoss     the same without the other view in the sum, that term weighted by weight_fn

With `gather_distributed` the sums run over the views of all ranks; what a rank keeps is N x D.
"""
# ruff: noqa: E402

import importlib

from fastsim.integrations import names

names.check_version("lightly", 1, 5, 21)

import torch
from lightly.loss.dcl_loss import DCLLoss as _TheirDCLLoss
from lightly.loss.dcl_loss import DCLWLoss as _TheirDCLWLoss
from lightly.loss.ntx_ent_loss import NTXentLoss as _TheirNTXentLoss
from lightly.utils import dist

from fastsim.autocast import in_autocast
from fastsim.engine.log_sum_exp import log_sum_exp
from fastsim.integrations.dtypes import as_theirs, code_of, in_one_dtype
from fastsim.integrations.overrides import Hooked, is_plain, say_once
from fastsim.losses import nt_xent
from fastsim.precision import widened
from fastsim.reduce import as_float
from fastsim.scores import compute_dtype, paired_cosine_similarity

_CROSS_ENTROPY = torch.nn.CrossEntropyLoss()


class _TwoViews(Hooked):
    """A loss of two views (N, D) each, computed over both at once by `fused`.

    That is given them in the dtype of autocast, and as they are.
    """

    def forward(self, out0, out1):
        """The loss of two views (N, D) of a batch."""
        option = self.unfused_option()
        if option is not None:
            say_once(self, f"{option} has no fused form", "lightly", stacklevel=4)
        if option is not None or len(out0) < 2:
            return super().forward(out0, out1)
        sides = in_one_dtype(out0, out1)
        loss = self.fused(*in_autocast(*sides), sides)
        theirs = super().forward
        # All ranks ask at once, or none: theirs gathers too.
        owner = type(self), code_of(getattr(self, "weight_fn", None)), self.is_gathered()
        return as_theirs(
            loss, owner, lambda: theirs(out0.detach()[:2], out1.detach()[:2]), out0, out1
        )

    def unfused_option(self):
        """The option without a fused form, or what has been replaced, or None."""
        return self.replaced_hook() or (None if self.temperature > 0 else "temperature")

    def is_gathered(self):
        """Whether a view is held against those of all ranks."""
        return self.gather_distributed and dist.world_size() > 1

    def log_sums(self, out0, out1, *, other_view):
        """(2, N) log-sum-exps of a view's logits with all others, the `other_view` of the same
        image among them or not.
        """
        views, everyone = torch.cat([out0, out1]), None
        count = total = len(out0)
        first = 0
        if self.is_gathered():
            everyone = torch.cat([part for side in (out0, out1) for part in dist.gather(side)])
            total, first = len(everyone) // 2, dist.rank() * count
        images = torch.arange(total, device=out0.device)
        second = total if other_view else 0  # with it a view is left out for itself alone
        ids, all_ids = (
            torch.cat([of_first, of_first + second])
            for of_first in (images[first : first + count], images)
        )
        scale = 1 / self.temperature
        return log_sum_exp(views, everyone, scale=scale, exclude=(ids, all_ids)).view(2, -1)


class NTXentLoss(_TwoViews, _TheirNTXentLoss, hooks=()):
    """`fastsim.nt_xent` of both views; arguments as lightly's loss."""

    def unfused_option(self):
        if not is_plain(self.cross_entropy, _CROSS_ENTROPY):
            return "cross_entropy"
        return super().unfused_option()

    def fused(self, out0, out1, sides):
        if any(self.memory_bank.size):
            return self._with_bank(*sides)
        if not self.is_gathered():
            images = torch.arange(len(out0), device=out0.device).repeat(2)
            return nt_xent(torch.cat([out0, out1]), images, temperature=self.temperature)
        positive = widened(paired_cosine_similarity(out0, out1)) / self.temperature
        sums = self.log_sums(out0, out1, other_view=True)
        return (sums - positive).mean().to(compute_dtype(out0))

    def _with_bank(self, out0, out1):
        """Of the first view, the second its positive, what the bank holds its negatives."""
        out0, out1 = (torch.nn.functional.normalize(side, dim=1) for side in (out0, out1))
        out1, bank = self.memory_bank.forward(out1, update=out0.requires_grad)
        bank = bank.T.to(out0.device)
        out0, out1, bank = in_autocast(*in_one_dtype(out0, out1, bank))
        scale = 1 / self.temperature
        positive = scale * widened((as_float(out0) * as_float(out1)).sum(1))
        negative = log_sum_exp(out0, bank, scale=scale, similarity="dot")
        return (torch.logaddexp(positive, negative) - positive).mean().to(compute_dtype(out0))


class DCLLoss(_TwoViews, _TheirDCLLoss, hooks=("_loss",)):
    """Decoupled contrastive loss of both views; arguments as lightly's loss."""

    def fused(self, out0, out1, sides):
        negative = self.log_sums(out0, out1, other_view=False)
        positive = widened(paired_cosine_similarity(out0, out1)) / self.temperature
        if self.weight_fn:
            unit = torch.nn.functional.normalize
            sides = [unit(side, dim=1) for side in sides]
            # A weight may be of each row or of all.
            weights = self.weight_fn(*sides), self.weight_fn(*sides[::-1])
            positive = torch.stack([positive * weight for weight in weights])
        return (negative.mean() - positive.mean()).to(compute_dtype(out0))


class DCLWLoss(_TheirDCLWLoss, DCLLoss):
    """The same with their weights of the positives."""


def _package():
    return importlib.import_module("lightly.loss")


__all__ = ["DCLLoss", "DCLWLoss", "NTXentLoss"]
__getattr__, __dir__, _ = names.served(__name__, _package)

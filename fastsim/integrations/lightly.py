"""The contrastive losses of lightly without their matrices: change the import alone.

    from fastsim.integrations.lightly import DCLLoss, DCLWLoss, NTXentLoss

Each is a subclass of lightly's class of that name (version 1.5.21 or later; DCLLoss was a different
sum before), with its arguments, defaults and results. Every other name is that of lightly.loss. If
a method or module of theirs has been replaced, lightly's code computes the loss, and a warning says
so once.

    NTXentLoss  for each view i: log sum_{j != i} exp(z_ij) - z_{i, other view},
                z = cos / temperature; with a memory bank j is the other view and the bank's rows
    DCLLoss     the same without the other view in the sum, and z_{i, other view} times weight_fn

With `gather_distributed` the sums run over the views of all ranks; a rank keeps N x D numbers.
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

from fastsim.autocast import in_autocast, joined
from fastsim.checks import check_alike
from fastsim.engine.log_sum_exp import log_sum_exp
from fastsim.integrations.dtypes import function_key, in_one_dtype, in_their_dtype
from fastsim.integrations.overrides import Hooked, is_plain, no_fused_form, replaced
from fastsim.losses import nt_xent
from fastsim.precision import compute_dtype, widened
from fastsim.reduce import as_float, inverse
from fastsim.scores import paired_cosine_similarity

_CROSS_ENTROPY = torch.nn.CrossEntropyLoss()


class _TwoViews(Hooked):
    """A loss of two views (N, D) each, which `fused(out0, out1, sides)` computes.

    out0, out1: the views in autocast's dtype; sides: the views as they were given.
    """

    _package = "lightly"

    def forward(self, out0, out1):
        """The loss of two views (N, D) of a batch."""
        if self.is_unfused() or len(out0) < 2:
            return super().forward(out0, out1)
        sides = in_one_dtype(out0, out1)
        loss = self.fused(*in_autocast(*sides), sides)
        theirs = super().forward

        def theirs_on_two_rows():
            return theirs(out0.detach()[:2], out1.detach()[:2])

        # With is_gathered() in the key all ranks look it up together: theirs gathers too.
        owner = type(self), function_key(getattr(self, "weight_fn", None)), self.is_gathered()
        inputs = out0, out1, self.bank(), self.temperature
        return in_their_dtype(loss, owner, theirs_on_two_rows, *inputs)

    def unfused_reason(self, *inputs):
        reason = super().unfused_reason(*inputs)
        if reason is None and not self.temperature > 0:
            reason = no_fused_form("temperature")
        return reason

    def bank(self):
        """The memory bank (rows, D) of the negatives, or None."""
        return None

    def is_gathered(self):
        """Whether a view is compared with the views of all ranks."""
        return self.gather_distributed and dist.world_size() > 1

    def log_sums(self, out0, out1, *, other_view):
        """(2, N) log-sum-exps of each view's logits with all views but itself.

        other_view: whether the other view of the same image is part of the sum.
        """
        views, all_views = joined([out0, out1]), None
        count = total = len(out0)
        first = 0
        if self.is_gathered():
            all_views = joined([part for side in (out0, out1) for part in dist.gather(side)])
            total, first = len(all_views) // 2, dist.rank() * count
        images = torch.arange(total, device=out0.device)
        # Equal ids are excluded. If the two views have distinct ids, that is the view itself alone.
        shift = total if other_view else 0
        ids, all_ids = (
            torch.cat([numbers, numbers + shift])
            for numbers in (images[first : first + count], images)
        )
        scale = inverse(self.temperature, out0)
        return log_sum_exp(views, all_views, scale=scale, exclude=(ids, all_ids)).view(2, -1)


class NTXentLoss(_TwoViews, _TheirNTXentLoss, hooks=()):
    """`fastsim.nt_xent` of both views; arguments as lightly's loss."""

    def unfused_reason(self, *inputs):
        if not is_plain(self.cross_entropy, _CROSS_ENTROPY):
            return replaced("cross_entropy")
        return super().unfused_reason(*inputs)

    def bank(self):
        return self.memory_bank.bank if any(self.memory_bank.size) else None

    def fused(self, out0, out1, sides):
        if self.bank() is not None:
            return self._with_bank(*sides)
        check_alike("out1", out1, "out0", out0, rows=True)
        if not self.is_gathered():
            images = torch.arange(len(out0), device=out0.device).repeat(2)
            return nt_xent(joined([out0, out1]), images, temperature=self.temperature)
        positive = widened(paired_cosine_similarity(out0, out1)) / self.temperature
        sums = self.log_sums(out0, out1, other_view=True)
        return (sums - positive).mean().to(compute_dtype(out0))

    def _with_bank(self, out0, out1):
        """The loss of the first view: the second is its positive, the bank holds its negatives."""
        out0, out1 = (torch.nn.functional.normalize(side, dim=1) for side in (out0, out1))
        out1, bank = self.memory_bank.forward(out1, update=out0.requires_grad)
        bank = bank.T.to(out0.device)
        out0, out1, bank = in_autocast(*in_one_dtype(out0, out1, bank))
        scale = inverse(self.temperature, out0)
        positive = scale * widened((as_float(out0) * as_float(out1)).sum(1))
        negative = log_sum_exp(out0, bank, scale=scale, similarity="dot")
        return (torch.logaddexp(positive, negative) - positive).mean().to(compute_dtype(out0))


class DCLLoss(_TwoViews, _TheirDCLLoss, hooks=("_loss",)):
    """Decoupled contrastive loss of both views; arguments as lightly's loss."""

    def fused(self, out0, out1, sides):
        check_alike("out1", out1, "out0", out0, rows=True)
        negative = self.log_sums(out0, out1, other_view=False)
        positive = widened(paired_cosine_similarity(out0, out1)) / self.temperature
        if self.weight_fn:
            unit = torch.nn.functional.normalize
            sides = [unit(side, dim=1) for side in sides]
            # weight_fn may return a weight per row or a single one.
            weights = self.weight_fn(*sides), self.weight_fn(*sides[::-1])
            positive = torch.stack([positive * weight for weight in weights])
        return (negative.mean() - positive.mean()).to(compute_dtype(out0))


class DCLWLoss(_TheirDCLWLoss, DCLLoss):
    """DCLLoss with lightly's weights of the positives."""


def _package():
    return importlib.import_module("lightly.loss")


__all__ = ["DCLLoss", "DCLWLoss", "NTXentLoss"]
__getattr__, __dir__, _ = names.forwarding(__name__, _package)

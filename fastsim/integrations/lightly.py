"""The contrastive losses of lightly without their matrices: change the import alone.

    from fastsim.integrations.lightly import DCLLoss, DCLWLoss, NTXentLoss

Each is a subclass of lightly's class of that name, 1.5.21 or later (DCLLoss of earlier ones is
another sum), with its arguments, defaults and results; every other name is that of lightly.loss.
With a memory bank, or gathered over processes, the answer is theirs, by their code, and so it is
where a method or module of theirs was replaced; a warning says so once.

    NTXentLoss  over both views: log sum_{j != i} exp(z_ij) - z_{i, other view},
                z = cos / temperature
    DCLLoss     the same without the other view in the sum, that term weighted by weight_fn
"""
# ruff: noqa: E402

import importlib

from fastsim.integrations import names

names.check_version("lightly", 1, 5, 21)

import torch
from lightly.loss.dcl_loss import DCLLoss as _TheirDCLLoss
from lightly.loss.dcl_loss import DCLWLoss as _TheirDCLWLoss
from lightly.loss.ntx_ent_loss import NTXentLoss as _TheirNTXentLoss

from fastsim.autocast import in_autocast
from fastsim.engine.log_sum_exp import log_sum_exp
from fastsim.integrations.dtypes import as_theirs, code_of, in_one_dtype
from fastsim.integrations.overrides import Hooked, is_plain, say_once
from fastsim.losses import nt_xent
from fastsim.precision import widened
from fastsim.scores import compute_dtype, paired_cosine_similarity

_CROSS_ENTROPY = torch.nn.CrossEntropyLoss()


class _TwoViews(Hooked):
    """A loss of two views (N, D) each, computed over both at once by `fused`."""

    def forward(self, out0, out1):
        """The loss of two views (N, D) of a batch."""
        option = self.unfused_option()
        if option is not None:
            say_once(self, f"{option} has no fused form", "lightly", stacklevel=4)
        if option is not None or len(out0) < 2:
            return super().forward(out0, out1)
        rows = torch.arange(len(out0), device=out0.device).repeat(2)
        sides = in_one_dtype(out0, out1)
        loss = self.fused(torch.cat(in_autocast(*sides)), rows, *sides)
        theirs = super().forward
        owner = type(self), code_of(getattr(self, "weight_fn", None))
        return as_theirs(
            loss, owner, lambda: theirs(out0.detach()[:2], out1.detach()[:2]), out0, out1
        )

    def unfused_option(self):
        """The option without a fused form, or what has been replaced, or None."""
        if self.gather_distributed:
            return "gather_distributed"
        return self.replaced_hook() or (None if self.temperature > 0 else "temperature")


class NTXentLoss(_TwoViews, _TheirNTXentLoss, hooks=()):
    """`fastsim.nt_xent` of both views; arguments as lightly's loss."""

    def unfused_option(self):
        if any(self.memory_bank.size):
            return "memory_bank_size"
        if not is_plain(self.cross_entropy, _CROSS_ENTROPY):
            return "cross_entropy"
        return super().unfused_option()

    def fused(self, views, rows, *_):
        return nt_xent(views, rows, temperature=self.temperature)


class DCLLoss(_TwoViews, _TheirDCLLoss, hooks=("_loss",)):
    """Decoupled contrastive loss of both views; arguments as lightly's loss."""

    def fused(self, views, rows, out0, out1):
        scale = 1 / self.temperature
        negative = log_sum_exp(views, scale=scale, exclude=(rows, rows)).view(2, -1)
        positive = scale * widened(paired_cosine_similarity(out0, out1))
        if self.weight_fn:
            unit = torch.nn.functional.normalize
            sides = unit(out0, dim=1), unit(out1, dim=1)
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

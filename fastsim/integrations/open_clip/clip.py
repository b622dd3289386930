"""ClipLoss, and CoCaLoss which is made of it."""

import functools

import torch

from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.features import checked, on_few
from fastsim.integrations.open_clip.gather import gather
from fastsim.integrations.overrides import Hooked, say_once
from fastsim.integrations.products import cross_entropy

theirs = peer.losses()
_Theirs = theirs.ClipLoss  # whatever is under that name later


class ClipLoss(Hooked, theirs.ClipLoss, hooks=("get_logits", "get_ground_truth")):
    """The mean of image -> text and text -> image cross entropy.

    local_loss: each rank's features against those of all, not all against all; gather_with_grad:
    the gathered features carry their gradient back to their ranks. cache_labels has no effect:
    there are no labels. ValueError for combinations that are refused, see the package.
    """

    @functools.wraps(theirs.ClipLoss.__init__)
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.check_options()

    def check_options(self):
        """ValueError for local_loss without gather_with_grad in several processes."""
        if self.local_loss and not self.gather_with_grad and self.world_size > 1:
            raise ValueError(
                "gather_with_grad: wanted True with local_loss, got False: gathered features"
                " without a gradient would leave out what each is to the rows of other ranks,"
                " and of its own"
            )

    def forward(
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ):
        """Features (N, D) each of this rank -> the loss, with `output_dict` in a dictionary."""
        given = image_features, text_features, logit_scale, logit_bias
        reason = self.replaced_hook()
        if getattr(self, "use_horovod", False):  # an option of version 3
            reason = "use_horovod"
        if reason is not None:
            say_once(self, f"{reason} has no fused form", "open_clip", stacklevel=4)
        if reason is not None or len(image_features) == 0:
            return super().forward(*given, output_dict=output_dict)
        loss = self._fused(*given)
        loss = as_theirs(loss, _Theirs, lambda: on_few(_Theirs(), given), *given)
        return {"contrastive_loss": loss} if output_dict else loss

    def _fused(self, image_features, text_features, logit_scale, logit_bias):
        images, texts, scale = checked(image_features, text_features, logit_scale)
        if self.world_size > 1:
            options = {"rank": self.rank, "with_grad": self.gather_with_grad}
            all_images, all_texts = (gather(f, **options) for f in (images, texts))
        if self.world_size > 1 and self.local_loss:
            first = self.rank * images.shape[0]
            loss = 0.5 * (
                _cross_entropy(images, all_texts, scale, first=first)
                + _cross_entropy(texts, all_images, scale, first=first)
            )
        else:
            if self.world_size > 1:
                images, texts = all_images, all_texts
            loss = _cross_entropy(images, texts, scale, symmetric=True)
        if logit_bias is not None:
            # A softmax does not see it; its gradient is 0, and not missing.
            loss = loss + 0 * torch.as_tensor(logit_bias).sum()
        return loss


class CoCaLoss(theirs.CoCaLoss, ClipLoss):
    """The same and a captioner's cross entropy, which is theirs."""


def _cross_entropy(rows, columns, scale, *, first=0, symmetric=False):
    """Of each row (N, D) among the columns (M, D), its own being column `first` + i."""
    positives = torch.arange(first, first + rows.shape[0], device=rows.device)
    return cross_entropy(rows, columns, positives, scale, symmetric=symmetric)

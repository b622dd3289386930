"""ClipLoss, and CoCaLoss which is made of it."""

import functools

import torch

from fastsim.integrations.dtypes import in_their_dtype
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.features import checked_features, on_two_rows
from fastsim.integrations.open_clip.gather import sides_of
from fastsim.integrations.overrides import Hooked, no_fused_form
from fastsim.integrations.products import cross_entropy

theirs = peer.losses()
_Theirs = theirs.ClipLoss  # as it is now: somebody may put another class under that name


class ClipLoss(Hooked, theirs.ClipLoss, hooks=("get_logits", "get_ground_truth")):
    """The mean of image -> text and text -> image cross entropy.

    local_loss: each rank compares its own features with those of all ranks, instead of all with
    all. gather_with_grad: gathered features carry their gradient back to their ranks. cache_labels
    has no effect, as there are no labels. ValueError for local_loss without gather_with_grad.
    """

    _package = "open_clip"

    @functools.wraps(theirs.ClipLoss.__init__)
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.check_options()

    def check_options(self):
        """ValueError for local_loss without gather_with_grad in several processes."""
        if self.local_loss and not self.gather_with_grad and self.world_size > 1:
            raise ValueError(
                "gather_with_grad: wanted True with local_loss, got False; without it the features"
                " get no gradient as candidates"
            )

    def forward(
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ):
        """Features (N, D) each of this rank -> the loss, with `output_dict` in a dictionary."""
        inputs = image_features, text_features, logit_scale, logit_bias
        if self.is_unfused() or len(image_features) == 0:
            return super().forward(*inputs, output_dict=output_dict)
        loss = self._fused(*inputs)
        loss = in_their_dtype(loss, _Theirs, lambda: on_two_rows(_Theirs(), inputs), *inputs)
        return {"contrastive_loss": loss} if output_dict else loss

    def unfused_reason(self, *inputs):
        if getattr(self, "use_horovod", False):  # an option of version 3
            return no_fused_form("use_horovod")
        return super().unfused_reason(*inputs)

    def _fused(self, image_features, text_features, logit_scale, logit_bias):
        images, texts, scale = checked_features(image_features, text_features, logit_scale)
        sides = sides_of(self, images, texts, with_grad=self.gather_with_grad)
        loss = contrastive(sides, scale)
        if logit_bias is not None:
            # The softmax does not depend on it. Its gradient is 0, not None.
            loss = loss + 0 * torch.as_tensor(logit_bias).sum()
        return loss


class CoCaLoss(theirs.CoCaLoss, ClipLoss):
    """ClipLoss, and the cross entropy of the captions, which open_clip computes."""


def contrastive(sides, scale):
    """The mean of image -> text and text -> image cross entropy of `Sides`."""
    if sides.images is sides.all_images:
        return _cross_entropy(sides.images, sides.texts, scale, symmetric=True)
    of_images = _cross_entropy(sides.images, sides.all_texts, scale, first=sides.first)
    of_texts = _cross_entropy(sides.texts, sides.all_images, scale, first=sides.first)
    return 0.5 * (of_images + of_texts)


def _cross_entropy(rows, columns, scale, *, first=0, symmetric=False):
    """Of each row (N, D) with the columns (M, D); the positive of row i is column `first` + i."""
    positives = torch.arange(first, first + rows.shape[0], device=rows.device)
    return cross_entropy(rows, columns, positives, scale, symmetric=symmetric)

"""ClipLoss, and CoCaLoss which is made of it."""

import functools

import torch

from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.features import checked, on_few
from fastsim.integrations.open_clip.gather import sides_of
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
        reason = unserved(self)
        if reason is not None:
            say_once(self, f"{reason} has no fused form", "open_clip", stacklevel=4)
        if reason is not None or len(image_features) == 0:
            return super().forward(*given, output_dict=output_dict)
        loss = self._fused(*given)
        loss = as_theirs(loss, _Theirs, lambda: on_few(_Theirs(), given), *given)
        return {"contrastive_loss": loss} if output_dict else loss

    def _fused(self, image_features, text_features, logit_scale, logit_bias):
        images, texts, scale = checked(image_features, text_features, logit_scale)
        sides = sides_of(self, images, texts, with_grad=self.gather_with_grad)
        loss = contrastive(sides, scale)
        if logit_bias is not None:
            # A softmax does not see it; its gradient is 0, and not missing.
            loss = loss + 0 * torch.as_tensor(logit_bias).sum()
        return loss


class CoCaLoss(theirs.CoCaLoss, ClipLoss):
    """The same and a captioner's cross entropy, which is theirs."""


def unserved(loss):
    """What of a ClipLoss has no fused form, a replaced hook or an option; None: all of it has."""
    horovod = getattr(loss, "use_horovod", False)  # an option of version 3
    return "use_horovod" if horovod else loss.replaced_hook()


def contrastive(sides, scale):
    """The mean of image -> text and text -> image cross entropy of `Sides`."""
    if sides.images is sides.all_images:
        return _cross_entropy(sides.images, sides.texts, scale, symmetric=True)
    of_images = _cross_entropy(sides.images, sides.all_texts, scale, first=sides.first)
    of_texts = _cross_entropy(sides.texts, sides.all_images, scale, first=sides.first)
    return 0.5 * (of_images + of_texts)


def _cross_entropy(rows, columns, scale, *, first=0, symmetric=False):
    """Of each row (N, D) among the columns (M, D), its own being column `first` + i."""
    positives = torch.arange(first, first + rows.shape[0], device=rows.device)
    return cross_entropy(rows, columns, positives, scale, symmetric=symmetric)

"""SigLipLoss."""

import inspect

import torch

from fastsim.autocast import in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import DOT
from fastsim.checks import check_choice
from fastsim.integrations.dtypes import in_their_dtype
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.features import checked_features, mean_loss, on_two_rows, scalar
from fastsim.integrations.open_clip.gather import gather
from fastsim.integrations.overrides import Hooked
from fastsim.losses import siglip_from_scores
from fastsim.pairs import parse_targets
from fastsim.tile_loss import TileLoss

theirs = peer.losses()
_Theirs = theirs.SigLipLoss  # as it is now: somebody may put another class under that name
DISTRIBUTIONS = ("bidir", "shift", "reduce", "gather")
_CHUNKS = "chunk_size" in inspect.signature(theirs.SigLipLoss.__init__).parameters  # version 4


class SigLipLoss(
    Hooked, theirs.SigLipLoss, hooks=("get_logits", "get_ground_truth", "_loss", "_chunked_loss")
):
    """Every image-text pair as a binary decision.

    dist_impl: how open_clip exchanges features: "bidir", "shift", "reduce" or "gather". Here they
    are always gathered, which gives the same sum. cache_labels and chunk_size (of version 4) have
    no effect, as no logits are kept.
    """

    _package = "open_clip"

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
    ):
        check_choice("dist_impl", dist_impl or DISTRIBUTIONS[0], DISTRIBUTIONS)
        chunks = {"chunk_size": chunk_size} if _CHUNKS else {}
        super().__init__(cache_labels, rank, world_size, dist_impl, **chunks)
        self.chunk_size = chunk_size

    def check_options(self):
        """Every option of theirs is supported."""

    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        """Features (N, D) each of this rank -> the loss, with `output_dict` in a dictionary."""
        inputs = image_features, text_features, logit_scale, logit_bias
        if self.is_unfused() or len(image_features) == 0:
            return super().forward(*inputs, output_dict=output_dict)
        loss = self._fused(*inputs)
        loss = in_their_dtype(loss, _Theirs, lambda: on_two_rows(_Theirs(), inputs), *inputs)
        return {"contrastive_loss": loss} if output_dict else loss

    def _fused(self, image_features, text_features, logit_scale, logit_bias):
        images, texts, scale = checked_features(image_features, text_features, logit_scale)
        bias = 0.0 if logit_bias is None else scalar("logit_bias", logit_bias)
        rows, targets = images.shape[0], None
        if self.world_size > 1:
            texts = gather(texts, self.rank)
            columns = torch.arange(texts.shape[0], device=texts.device)
            targets = columns[self.rank * rows : (self.rank + 1) * rows], columns
        images, texts = in_autocast(images, texts)
        backend = pick(None, images, texts, scale, bias, kind="sigmoid", extras=(DOT,))
        if backend.name == "eager":
            return siglip_from_scores(images @ texts.T, targets, scale=scale, bias=bias)
        pairs = parse_targets(targets, rows, texts.shape[0], texts.device)
        tile = TileLoss("sigmoid", pairs, cosine=False)

        def formula(scores, scale, bias):
            return siglip_from_scores(scores, targets, scale=scale, bias=bias, reduction="none")

        return mean_loss(tile, images, texts, scale, formula, backend, bias=bias)

"""SigLipLoss."""

import inspect

import torch

from fastsim.autocast import in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import DOT
from fastsim.checks import check_choice
from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.features import checked, mean, on_few, scalar
from fastsim.integrations.open_clip.gather import gather
from fastsim.integrations.overrides import Hooked, say_once
from fastsim.losses import siglip_from_scores
from fastsim.pairs import parse_targets
from fastsim.tile import Tile

theirs = peer.losses()
_Theirs = theirs.SigLipLoss  # whatever is under that name later
DISTRIBUTIONS = ("bidir", "shift", "reduce", "gather")
_CHUNKS = "chunk_size" in inspect.signature(theirs.SigLipLoss.__init__).parameters  # version 4


class SigLipLoss(
    Hooked, theirs.SigLipLoss, hooks=("get_logits", "get_ground_truth", "_loss", "_chunked_loss")
):
    """Every image-text pair as a binary decision.

    dist_impl: "bidir", "shift", "reduce" or "gather", how features travel there; here they are
    gathered whichever is named, which gives the same sum. cache_labels has no effect, nor has
    chunk_size, of version 4: no logits are kept.
    """

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
        """All that they take is served."""

    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        """Features (N, D) each of this rank -> the loss, with `output_dict` in a dictionary."""
        given = image_features, text_features, logit_scale, logit_bias
        hook = self.replaced_hook()
        if hook is not None:
            say_once(self, f"{hook} has no fused form", "open_clip", stacklevel=4)
        if hook is not None or len(image_features) == 0:
            return super().forward(*given, output_dict=output_dict)
        loss = self._fused(*given)
        loss = as_theirs(loss, _Theirs, lambda: on_few(_Theirs(), given), *given)
        return {"contrastive_loss": loss} if output_dict else loss

    def _fused(self, image_features, text_features, logit_scale, logit_bias):
        images, texts, scale = checked(image_features, text_features, logit_scale)
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
        tile = Tile("sigmoid", pairs, cosine=False)

        def formula(scores, scale, bias):
            return siglip_from_scores(scores, targets, scale=scale, bias=bias, reduction="none")

        return mean(tile, images, texts, scale, formula, backend, bias=bias)

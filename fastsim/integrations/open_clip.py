"""The losses of open_clip without the N x N logits: change the import, keep everything else.

    from fastsim.integrations.open_clip import ClipLoss, SigLipLoss

Arguments, defaults and results of open_clip_torch 3.3. Image and text features are taken as they
are, normalised or not; `logit_scale` arrives exponentiated, and has its gradient. In several
processes the features of all are gathered: what each rank keeps is N x D, not N x N.

Refused: `use_horovod`, and `local_loss` without `gather_with_grad`, which there leaves out the
gradient of every feature as somebody else's negative.
"""

import torch
from torch import Tensor, nn

from fastsim.backends import pick
from fastsim.checks import check_alike, check_choice, check_embeddings, check_number
from fastsim.engine.autograd import tile_loss
from fastsim.losses import info_nce_from_scores, siglip_from_scores
from fastsim.losses.reduce import inverse, row_weights
from fastsim.operators import once_differentiable
from fastsim.pairs import Pairs, parse_targets
from fastsim.scores import compute_dtype
from fastsim.tile import Tile

DISTRIBUTIONS = ("bidir", "shift", "reduce", "gather")


class ClipLoss(nn.Module):
    """The mean of image -> text and text -> image cross entropy.

    local_loss: each rank's features against those of all, not all against all; gather_with_grad:
    the gathered features carry their gradient back to their ranks. cache_labels has no effect:
    there are no labels. ValueError for combinations that are refused, see the module.
    """

    def __init__(
        self,
        local_loss=False,
        gather_with_grad=False,
        cache_labels=False,
        rank=0,
        world_size=1,
        use_horovod=False,
    ):
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod: wanted False, features are gathered by torch alone")
        if local_loss and not gather_with_grad and world_size > 1:
            raise ValueError(
                "gather_with_grad: wanted True with local_loss, got False: gathered features"
                " without a gradient would leave out what each is to the rows of other ranks,"
                " and of its own"
            )
        self.local_loss = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod

    def forward(
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ):
        """Features (N, D) each of this rank -> the loss, with `output_dict` in a dictionary."""
        scale = _check(image_features, text_features, logit_scale)
        if self.world_size > 1 and self.local_loss:
            images, texts = (self._gather(f) for f in (image_features, text_features))
            first = self.rank * image_features.shape[0]
            loss = 0.5 * (
                _cross_entropy(image_features, texts, scale, first=first)
                + _cross_entropy(text_features, images, scale, first=first)
            )
        else:
            if self.world_size > 1:
                image_features, text_features = map(self._gather, (image_features, text_features))
            loss = _cross_entropy(image_features, text_features, scale, symmetric=True)
        if logit_bias is not None:
            # A softmax does not see it; its gradient is 0, and not missing.
            loss = loss + 0 * torch.as_tensor(logit_bias).sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _gather(self, features):
        if self.gather_with_grad:
            return _gather(features)
        gathered = _all_gather(features.detach())
        gathered[self.rank] = features
        return torch.cat(gathered)


class SigLipLoss(nn.Module):
    """Every image-text pair as a binary decision.

    dist_impl: "bidir", "shift", "reduce" or "gather", how features travel there; here they are
    gathered whichever is named, which gives the same sum. cache_labels has no effect.
    """

    def __init__(self, cache_labels=False, rank=0, world_size=1, dist_impl=None):
        super().__init__()
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl or "bidir"
        check_choice("dist_impl", self.dist_impl, DISTRIBUTIONS)

    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        """Features (N, D) each of this rank -> the loss, with `output_dict` in a dictionary."""
        scale = _check(image_features, text_features, logit_scale)
        bias = 0.0 if logit_bias is None else _scalar("logit_bias", logit_bias)
        rows = image_features.shape[0]
        texts = text_features if self.world_size == 1 else _gather(text_features)
        columns = torch.arange(texts.shape[0], device=texts.device)
        targets = columns[self.rank * rows : (self.rank + 1) * rows], columns
        if self.world_size == 1:
            targets = None
        backend = pick(None, image_features, texts, scale, bias, kind="sigmoid")
        if backend.name == "eager":
            scores = image_features @ texts.T
            loss = siglip_from_scores(scores, targets, scale=scale, bias=bias)
        else:
            pairs = parse_targets(targets, rows, texts.shape[0], texts.device)
            tile = Tile("sigmoid", pairs, cosine=False)

            def formula(scores, scale, bias):
                return siglip_from_scores(scores, targets, scale=scale, bias=bias, reduction="none")

            loss = _mean(tile, image_features, texts, scale, formula, backend, bias=bias)
        return {"contrastive_loss": loss} if output_dict else loss


def _cross_entropy(rows, columns, scale, *, first=0, symmetric=False):
    """Of each row (N, D) among the columns (M, D), its own being column `first` + i."""
    positives = torch.arange(first, first + rows.shape[0], device=rows.device)
    backend = pick(None, rows, columns, scale, kind="softmax")
    if backend.name == "eager":
        options = {"temperature": inverse(scale, rows), "symmetric": symmetric}
        return info_nce_from_scores(rows @ columns.T, positives, **options)
    tile = Tile("softmax", Pairs(positives), symmetric=symmetric, cosine=False)

    def formula(scores, scale, _):
        given = {"temperature": 1 / scale, "symmetric": symmetric, "reduction": "none"}
        return info_nce_from_scores(scores, positives, **given)

    return _mean(tile, rows, columns, scale, formula, backend)


def _mean(tile, rows, columns, scale, formula, backend, **rest):
    weights = row_weights("mean", rows.shape[0], compute_dtype(rows), rows.device)
    given = {"weights": weights, "formula": formula, "backend": backend}
    return tile_loss(tile, rows, columns, scale=scale, **given, **rest)


def _check(image_features, text_features, logit_scale):
    """The scale as a number or 0-d tensor, everything looked at."""
    check_embeddings("image_features", image_features)
    check_embeddings("text_features", text_features)
    check_alike("text_features", text_features, "image_features", image_features, rows=True)
    scale = _scalar("logit_scale", logit_scale)
    check_number("logit_scale", scale, positive=True)
    return scale


def _scalar(name, value):
    """A number or a tensor of one element, whatever its shape."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: wanted one element, got shape {tuple(value.shape)}")
        return value.reshape(())
    return value


# ---- several processes ----


def _gather(features):
    """The features of all ranks (N of all, D), with their gradient."""
    return _Gather.apply(features)


def _all_gather(features):
    """The features of each rank, as a list; all have as many rows."""
    parts = [torch.empty_like(features) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, features.contiguous())
    return parts


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        ctx.rows = features.shape[0]
        return torch.cat(_all_gather(features))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # A sum over all ranks rather than a scattered one, which not every transport has.
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad[torch.distributed.get_rank() * ctx.rows :][: ctx.rows]

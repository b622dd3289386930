"""DistillClipLoss: ClipLoss, and a teacher's cross entropy.

p_ij and q_ij are the softmax, over the texts j, of the logits that the teacher's features and the
student's give image i. The cross entropy of a row is found without either matrix:

    - sum_j p_ij log q_ij = KL(p_i || q_i) + H(p_i),   H(p_i) = log M - KL(p_i || 1 / M)

Both divergences are a loss of the engine; the second is that of a student whose scores are all 0.
"""

import math
from functools import partial

import torch
from torch import Tensor

from fastsim.autocast import in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import DOT, TEACHER
from fastsim.checks import check_device
from fastsim.integrations.dtypes import as_theirs
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.clip import ClipLoss, contrastive, unserved
from fastsim.integrations.open_clip.features import checked, mean, on_few
from fastsim.integrations.open_clip.gather import Sides, sides_of
from fastsim.integrations.overrides import say_once
from fastsim.losses.distill_passes import divergence
from fastsim.pairs import Factors, Pairs
from fastsim.reduce import as_float
from fastsim.scores import compute_dtype
from fastsim.tile import Tile

theirs = peer.losses()
_Theirs = theirs.DistillClipLoss  # whatever is under that name later
NAMES = "contrastive_loss", "distill_loss"


class DistillClipLoss(
    ClipLoss, theirs.DistillClipLoss, hooks=("get_logits", "get_ground_truth", "dist_loss")
):
    """ClipLoss, and the mean cross entropy of the student's softmax against the teacher's.

    The teacher's features are constants. Where one of them or its scale asks for a gradient, the
    code of open_clip runs, and a warning says so once.
    """

    def forward(
        self,
        image_features,
        text_features,
        logit_scale,
        dist_image_features,
        dist_text_features,
        dist_logit_scale,
        output_dict=False,
    ):
        """Features (N, D) and the teacher's (N, E) -> (contrastive loss, distillation loss), with
        `output_dict` in a dictionary.
        """
        student = image_features, text_features, logit_scale
        teacher = dist_image_features, dist_text_features, dist_logit_scale
        given = *student, *teacher
        reason = unserved(self)
        if reason is None and _is_learnt(teacher):
            reason = "a gradient of the teacher's features"
        if reason is not None:
            say_once(self, f"{reason} has no fused form", "open_clip", stacklevel=4)
        if reason is not None or len(image_features) == 0:
            return super(ClipLoss, self).forward(*given, output_dict=output_dict)  # theirs
        losses = self._both(student, teacher)
        losses = [
            as_theirs(loss, (_Theirs, place), partial(_theirs_on_few, place, given), *given)
            for place, loss in enumerate(losses)
        ]
        return dict(zip(NAMES, losses, strict=True)) if output_dict else tuple(losses)

    def _both(self, student, teacher):
        images, texts, scale = checked(*student)
        taught = checked(*teacher, prefix="dist_")
        if taught[0].shape[0] != images.shape[0]:
            raise ValueError(
                f"dist_image_features: wanted {images.shape[0]} rows, as many as image_features,"
                f" got {taught[0].shape[0]}"
            )
        check_device("dist_image_features", taught[0], "image_features", images)
        sides = Sides(*in_autocast(*sides_of(self, images, texts, with_grad=self.gather_with_grad)))
        of_teacher = sides_of(self, *_as_factors(*taught, images), with_grad=False)
        images = sides.images, sides.all_texts, of_teacher.images, of_teacher.all_texts
        texts = sides.texts, sides.all_images, of_teacher.texts, of_teacher.all_images
        distilled = (_taught_cross_entropy(*rows, scale) for rows in (images, texts))
        return contrastive(sides, scale), 0.5 * sum(distilled)


def _is_learnt(teacher):
    tensors = (value for value in teacher if isinstance(value, Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _theirs_on_few(place, given):
    return on_few(_Theirs(), given)[place]


def _as_factors(images, texts, scale, student):
    """The teacher's features in the student's compute type, whose products are its logits."""
    images, texts = (side.to(compute_dtype(student)) for side in in_autocast(images, texts))
    return images * scale, texts


def _taught_cross_entropy(rows, columns, taught_rows, taught_columns, scale):
    """The mean over the rows (N, D) of -sum_j p_ij log q_ij, j over the columns (M, D).

    p: the softmax of the products of taught_rows (N, E) and taught_columns (M, E).
    """
    backend = pick(None, rows, columns, scale, kind="distillation", extras=(DOT, TEACHER))
    if backend.name == "eager":
        own = scale * (as_float(rows) @ as_float(columns).T)
        taught = (taught_rows @ taught_columns.T).softmax(1)
        return -(taught * own.log_softmax(1)).sum(1).mean()
    pairs = Pairs(factors=Factors(taught_rows, taught_columns))
    tile = Tile("distillation", pairs, cosine=False)

    def formula(scores, scale, _):
        return divergence(scores * scale, taught_rows @ taught_columns.T)

    of_tile = partial(mean, tile, formula=formula, backend=backend, measured=False)
    no_features = (side.new_zeros(side.shape[0], 1) for side in (rows, columns))
    entropy = math.log(columns.shape[0]) - of_tile(*no_features, scale=1.0)
    return of_tile(rows, columns, scale=scale) + entropy

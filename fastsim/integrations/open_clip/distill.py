"""DistillClipLoss: ClipLoss, and a teacher's cross entropy.

For image i, p_ij is the teacher's softmax over the texts j, and q_ij the student's. The cross
entropy of a row needs neither matrix:

    - sum_j p_ij log q_ij = KL(p_i || q_i) + H(p_i),   H(p_i) = log M - KL(p_i || 1 / M)

The engine computes both divergences. The second is that of a student whose scores are all 0.
"""

import math
from functools import partial

import torch
from torch import Tensor

from fastsim.autocast import in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import DOT, TEACHER
from fastsim.checks import check_device
from fastsim.integrations.dtypes import in_their_dtype
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.clip import ClipLoss, contrastive
from fastsim.integrations.open_clip.features import checked_features, mean_loss, on_two_rows
from fastsim.integrations.open_clip.gather import Sides, sides_of
from fastsim.integrations.overrides import no_fused_form
from fastsim.losses.distill_passes import divergence
from fastsim.pairs import Factors, Pairs
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float
from fastsim.tile_loss import TileLoss

theirs = peer.losses()
_Theirs = theirs.DistillClipLoss  # as it is now: somebody may put another class under that name
NAMES = "contrastive_loss", "distill_loss"


class DistillClipLoss(
    ClipLoss, theirs.DistillClipLoss, hooks=("get_logits", "get_ground_truth", "dist_loss")
):
    """ClipLoss, and the mean cross entropy of the student's softmax against the teacher's.

    The teacher's features are constants. If they or their scale require a gradient, the code of
    open_clip computes the loss, and a warning says so once.
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
        inputs = *student, *teacher
        if self.is_unfused(*inputs) or len(image_features) == 0:
            return super(ClipLoss, self).forward(*inputs, output_dict=output_dict)  # theirs
        losses = self._both(student, teacher)
        losses = [
            in_their_dtype(
                loss, (_Theirs, index), partial(_theirs_on_two_rows, index, inputs), *inputs
            )
            for index, loss in enumerate(losses)
        ]
        return dict(zip(NAMES, losses, strict=True)) if output_dict else tuple(losses)

    def unfused_reason(self, *inputs):
        reason = super().unfused_reason(*inputs)
        teacher = (value for value in inputs[3:] if isinstance(value, Tensor))
        learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in teacher)
        if reason is None and learns:
            reason = no_fused_form("a gradient of the teacher's features")
        return reason

    def _both(self, student, teacher):
        images, texts, scale = checked_features(*student)
        teacher = checked_features(*teacher, prefix="dist_")
        if teacher[0].shape[0] != images.shape[0]:
            raise ValueError(
                f"dist_image_features: wanted {images.shape[0]} rows, as many as image_features,"
                f" got {teacher[0].shape[0]}"
            )
        check_device("dist_image_features", teacher[0], "image_features", images)
        sides = Sides(*in_autocast(*sides_of(self, images, texts, with_grad=self.gather_with_grad)))
        teacher = sides_of(self, *_as_factors(*teacher, images), with_grad=False)
        by_image = sides.images, sides.all_texts, teacher.images, teacher.all_texts
        by_text = sides.texts, sides.all_images, teacher.texts, teacher.all_images
        distillation = (_teacher_cross_entropy(*rows, scale) for rows in (by_image, by_text))
        return contrastive(sides, scale), 0.5 * sum(distillation)


def _theirs_on_two_rows(index, inputs):
    return on_two_rows(_Theirs(), inputs)[index]


def _as_factors(images, texts, scale, student):
    """The teacher's features in the student's compute dtype; their products are its logits."""
    images, texts = (side.to(compute_dtype(student)) for side in in_autocast(images, texts))
    return images * scale, texts


def _teacher_cross_entropy(rows, columns, teacher_rows, teacher_columns, scale):
    """The mean over the rows (N, D) of -sum_j p_ij log q_ij, j over the columns (M, D).

    p: the softmax of the products of teacher_rows (N, E) and teacher_columns (M, E).
    """
    backend = pick(None, rows, columns, scale, kind="distillation", extras=(DOT, TEACHER))
    if backend.name == "eager":
        logits = scale * (as_float(rows) @ as_float(columns).T)
        targets = (teacher_rows @ teacher_columns.T).softmax(1)
        return -(targets * logits.log_softmax(1)).sum(1).mean()
    pairs = Pairs(factors=Factors(teacher_rows, teacher_columns))
    tile = TileLoss("distillation", pairs, cosine=False)

    def formula(scores, scale, _):
        return divergence(scores * scale, teacher_rows @ teacher_columns.T)

    of_tile = partial(mean_loss, tile, formula=formula, backend=backend, for_metrics=False)
    no_features = (side.new_zeros(side.shape[0], 1) for side in (rows, columns))
    entropy = math.log(columns.shape[0]) - of_tile(*no_features, scale=1.0)
    return of_tile(rows, columns, scale=scale) + entropy

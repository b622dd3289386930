"""MegaBatchMarginLoss: each anchor's hardest negative in the batch, found in one pass.

L_i = relu(positive_margin - cos_ii) + relu(max_{j != i} cos_ij - negative_margin)
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.autocast import joined
from fastsim.backends import pick
from fastsim.integrations.dtypes import in_one_dtype
from fastsim.integrations.sentence_transformers.fused import Fused, check_columns
from fastsim.losses import closest_negative
from fastsim.scores import dense_cosines, paired_cosine_similarity

SMALL = 1 << 14  # scores; up to here the matrix costs less than the calls that avoid it


class MegaBatchMarginLoss(Fused, theirs.MegaBatchMarginLoss):
    """Hardest-negative margin loss; arguments as sentence-transformers' loss."""

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns [anchors, positives], each (N, D) -> scalar."""
        return self.calculate_loss([[column] for column in embeddings])

    def fused(self, embeddings, labels):
        embeddings = embeddings[:2]
        check_columns(embeddings)
        anchors, positives = embeddings
        if len(anchors) ** 2 <= SMALL:
            scores = dense_cosines(anchors, positives, pick(None, anchors))
            diagonal = torch.eye(len(anchors), dtype=torch.bool, device=scores.device)
            positive = scores.diagonal()
            closest = scores.masked_fill(diagonal, -torch.inf).max(1).values
        else:
            positive = paired_cosine_similarity(anchors, positives)
            closest, _ = closest_negative(anchors, positives, mining="hard")
        hinges = torch.relu(self.positive_margin - positive)
        return (hinges + torch.relu(closest - self.negative_margin)).mean()

    def calculate_loss(self, reps, labels=None, *, with_backward=False):
        """The loss of columns given as lists of mini-batches; detached if with_backward."""
        theirs = super().calculate_loss
        embeddings = [joined(column) for column in reps]
        if self.needs_theirs(embeddings):
            return theirs(reps, labels, with_backward=with_backward)
        loss = self.fused(in_one_dtype(*embeddings), labels)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return self.in_their_dtype(loss, lambda *rows: theirs([[row] for row in rows]), embeddings)

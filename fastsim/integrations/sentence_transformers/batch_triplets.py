"""The four triplet losses over one labelled column (fastsim.losses.batch_hard_triplet and beside).

As there, a row without a positive has the distance 0 to it. Where a batch has one class there is
no triplet: the loss is 0 with zero gradient, not theirs.
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.sentence_transformers.fused import Fused, class_labels
from fastsim.losses import batch_all_triplet, batch_semi_hard_triplet, hardest_pairs

_Distance = theirs.BatchHardTripletLossDistanceFunction
DISTANCES = {
    _Distance.euclidean_distance: "euclidean",
    _Distance.cosine_distance: "cosine",
}


class _OneColumn(Fused):
    """A loss of one column; `fused(embeddings, labels, distance)` computes it.

    The model is under `model`: under another name, as theirs, a trainer does not find it when it
    wraps the model for several devices, whose gradients then are not synchronised.
    """

    @property
    def sentence_embedder(self):
        return self.model

    def __setattr__(self, name, value):
        super().__setattr__("model" if name == "sentence_embedder" else name, value)

    def forward(self, sentence_features, labels):
        """The loss of one tokenized column with class labels."""
        (feature,) = sentence_features
        return self.compute_loss_from_embeddings(
            [self.model(feature)["sentence_embedding"]], labels
        )

    def compute_loss_from_embeddings(self, embeddings, labels):
        """The loss of the column [embeddings (N, D)] with N class labels -> scalar."""
        distance = DISTANCES.get(self.distance_metric)
        if distance is None:
            self.unfused("distance_metric")
            return super().compute_loss_from_embeddings(embeddings, labels)
        (column,) = embeddings
        return self.fused(column, class_labels(self, labels, len(column)), distance)


def _hardest_gap(embeddings, labels, distance):
    """How much farther each row's hardest positive is than its hardest negative (N,)."""
    hardest = hardest_pairs(embeddings, labels, distance=distance)
    positive = torch.where(hardest.positive_index >= 0, hardest.positive, 0.0)
    return positive - hardest.negative  # -inf without a negative


class BatchHardTripletLoss(_OneColumn, theirs.BatchHardTripletLoss):
    """Farthest positive, nearest negative; arguments as sentence-transformers' loss."""

    def fused(self, embeddings, labels, distance):
        gap = _hardest_gap(embeddings, labels, distance)
        return torch.relu(gap + self.triplet_margin).mean()


class BatchHardSoftMarginTripletLoss(_OneColumn, theirs.BatchHardSoftMarginTripletLoss):
    """The same with a soft margin; arguments as sentence-transformers' loss."""

    def fused(self, embeddings, labels, distance):
        return torch.nn.functional.softplus(_hardest_gap(embeddings, labels, distance)).mean()


class BatchSemiHardTripletLoss(_OneColumn, theirs.BatchSemiHardTripletLoss):
    """Semi-hard negatives; arguments as sentence-transformers' loss."""

    def fused(self, embeddings, labels, distance):
        return batch_semi_hard_triplet(embeddings, labels, margin=self.margin, distance=distance)


class BatchAllTripletLoss(_OneColumn, theirs.BatchAllTripletLoss):
    """All triplets; arguments as sentence-transformers' loss."""

    def fused(self, embeddings, labels, distance):
        return batch_all_triplet(embeddings, labels, margin=self.triplet_margin, distance=distance)

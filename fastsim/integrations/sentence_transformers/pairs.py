"""Sentence-BERT's losses of paired rows: CosineSimilarityLoss, SoftmaxLoss, TripletLoss."""

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.overrides import patched_attribute
from fastsim.integrations.sentence_transformers.fused import Fused, check_columns, check_labels
from fastsim.losses import triplet_margin
from fastsim.reduce import as_float
from fastsim.scores import paired_cosine_similarity

_Metric = theirs.TripletDistanceMetric


class CosineSimilarityLoss(
    Fused, theirs.CosineSimilarityLoss, their_module=theirs.CosineSimilarityLoss.__module__
):
    """Any loss function on the cosines of pairs; arguments as sentence-transformers' loss.

    Columns after two are ignored.
    """

    def fused(self, embeddings, labels):
        embeddings = embeddings[:2]
        check_columns(embeddings)
        labels = check_labels(self, labels, len(embeddings[0]))
        cosines = paired_cosine_similarity(*embeddings)
        weight = next(self.cos_score_transformation.parameters(), None)
        if weight is not None and weight.dtype.itemsize == 2:
            cosines = cosines.to(weight.dtype)  # what it meets there
        cosines = self.cos_score_transformation(cosines)
        return self.loss_fct(cosines, labels.to(cosines.dtype))


class SoftmaxLoss(Fused, theirs.SoftmaxLoss, their_module=theirs.SoftmaxLoss.__module__):
    """A classifier on (u; v; |u - v|; u v); arguments as sentence-transformers' loss.

    Each part meets its share of the weight: the concatenation of them is never made. A `classifier`
    other than a Linear with a bias has no fused form.
    """

    def forward(self, sentence_features, labels):
        """The loss of two tokenized columns; without labels (embeddings, logits)."""
        option = self.unfused_option()
        if option is not None:
            self.say_unfused(option, stacklevel=4)
            return super().forward(sentence_features, labels)
        return self.compute_loss_from_embeddings(
            embed_columns(self.model, sentence_features), labels
        )

    def unfused_option(self):
        layer = self.classifier
        plain = type(layer) is torch.nn.Linear and patched_attribute(layer) is None
        return None if plain and layer.bias is not None else "classifier"

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns [u, v], each (N, D); labels of N classes or (N, classes)."""
        check_columns(embeddings, most=2)
        logits = self._logits(*embeddings)
        if labels is None:
            return embeddings, logits
        if self.num_labels == 1 or labels.shape != logits.shape:
            labels = labels.view(-1)
        return self.loss_fct(logits, labels)

    def _logits(self, u, v):
        parts = [u, v] if self.concatenation_sent_rep else []
        if self.concatenation_sent_difference:
            parts.append((u - v).abs())
        if self.concatenation_sent_multiplication:
            parts.append(u * v)
        weight, logits = self.classifier.weight, 0
        for part, share in zip(parts, weight.split(u.shape[1], 1), strict=True):
            logits = logits + torch.nn.functional.linear(part.to(weight.dtype), share)
        return logits + self.classifier.bias.to(logits.dtype)


class TripletLoss(Fused, theirs.TripletLoss, their_module=theirs.TripletLoss.__module__):
    """Triplet loss of paired rows; arguments as sentence-transformers' loss.

    At Euclidean distance 0 the gradient of that distance is 0, where theirs is NaN.
    """

    def unfused_option(self):
        known = _Metric.COSINE, _Metric.EUCLIDEAN, _Metric.MANHATTAN
        return None if self.distance_metric in known else "distance_metric"

    def fused(self, embeddings, labels):
        check_columns(embeddings, fewest=3, most=3)
        anchors, positives, negatives = embeddings
        if self.distance_metric is _Metric.EUCLIDEAN:
            return triplet_margin(anchors, positives, negatives, margin=self.triplet_margin)
        cosine = self.distance_metric is _Metric.COSINE
        distance = _cosine_distance if cosine else _manhattan_distance
        gap = distance(anchors, positives) - distance(anchors, negatives)
        return torch.relu(gap + self.triplet_margin).mean()


def _cosine_distance(x, y):
    return 1 - paired_cosine_similarity(x, y)


def _manhattan_distance(x, y):
    return torch.linalg.vector_norm(as_float(x) - as_float(y), 1, dim=1)

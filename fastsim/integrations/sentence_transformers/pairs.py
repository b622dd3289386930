"""Sentence-BERT's losses of paired rows: CosineSimilarityLoss, SoftmaxLoss, TripletLoss."""

import itertools
import types

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.autocast import without_autocast
from fastsim.integrations.dtypes import function_key, in_one_dtype, in_their_dtype
from fastsim.integrations.overrides import no_fused_form, patched_attribute
from fastsim.integrations.sentence_transformers.fused import (
    Fused,
    check_columns,
    check_labels,
)
from fastsim.losses import triplet_margin
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float
from fastsim.scores import paired_cosine_similarity

_their_softmax = theirs.SoftmaxLoss.forward
_FLAGS = tuple(f"concatenation_sent_{part}" for part in ("rep", "difference", "multiplication"))
_Metric = theirs.TripletDistanceMetric


class CosineSimilarityLoss(Fused, theirs.CosineSimilarityLoss):
    """Any loss function on the cosines of pairs; arguments as sentence-transformers' loss.

    Columns after the second are ignored.
    """

    def fused(self, embeddings, labels):
        embeddings = embeddings[:2]
        check_columns(embeddings)
        labels = check_labels(self, labels, len(embeddings[0]))
        transformation = self.cos_score_transformation
        cosines = _in_module_dtype(transformation, paired_cosine_similarity(*embeddings))
        cosines = transformation(cosines)
        labels = labels.to(compute_dtype(cosines))
        return self.loss_fct(cosines, labels)


class SoftmaxLoss(Fused, theirs.SoftmaxLoss):
    """A classifier on (u; v; |u - v|; u v); arguments as sentence-transformers' loss.

    Each part is multiplied by its own columns of the weight, so that the parts are never
    concatenated. The logits are computed in float32 or more, under autocast too. A `classifier`
    other than a Linear with a bias has no fused form.
    """

    def forward(self, sentence_features, labels):
        """The loss of two tokenized columns; without labels (embeddings, logits)."""
        if self.is_unfused():
            return super().forward(sentence_features, labels)
        return self.compute_loss_from_embeddings(
            embed_columns(self.model, sentence_features), labels
        )

    def unfused_reason(self, *inputs):
        layer = self.classifier
        plain = type(layer) is torch.nn.Linear and patched_attribute(layer) is None
        if not plain or layer.bias is None:
            return no_fused_form("classifier")
        return super().unfused_reason(*inputs)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns [u, v], each (N, D); labels of N classes or (N, classes)."""
        check_columns(embeddings, most=2)
        with without_autocast(embeddings[0].device.type):
            logits = self._logits(*map(as_float, in_one_dtype(*embeddings)))
        inputs = *embeddings, self.classifier.weight, labels

        def theirs():
            return self._theirs_on_two_rows(*embeddings, inputs[-1])

        if labels is None:
            owner = type(self), "logits"
            return embeddings, in_their_dtype(logits, owner, lambda: theirs()[1], *inputs)
        if self.num_labels == 1 or labels.shape != logits.shape:
            labels = labels.view(-1)
        loss = self.loss_fct(_in_module_dtype(self.loss_fct, logits), labels)
        return in_their_dtype(loss, (type(self), function_key(self.loss_fct)), theirs, *inputs)

    def _logits(self, u, v):
        parts = [u, v] if self.concatenation_sent_rep else []
        if self.concatenation_sent_difference:
            parts.append((u - v).abs())
        if self.concatenation_sent_multiplication:
            parts.append(u * v)
        weight, logits = as_float(self.classifier.weight), as_float(self.classifier.bias)
        for part, columns in zip(parts, weight.split(u.shape[1], 1), strict=True):
            logits = logits + torch.nn.functional.linear(part.to(weight.dtype), columns)
        return logits

    def _theirs_on_two_rows(self, u, v, labels):
        """What theirs returns for two rows: the loss, or without labels (embeddings, logits)."""
        options = {name: getattr(self, name) for name in ("num_labels", "loss_fct", *_FLAGS)}
        stand_in = types.SimpleNamespace(
            **options, classifier=self.classifier, model=lambda feature: feature
        )
        columns = [{"sentence_embedding": column.detach()[:2]} for column in (u, v)]
        return _their_softmax(stand_in, columns, None if labels is None else labels[:2])


class TripletLoss(Fused, theirs.TripletLoss):
    """Triplet loss of paired rows; arguments as sentence-transformers' loss.

    At Euclidean distance 0 the gradient of the distance is 0, where theirs is NaN.
    """

    def unfused_reason(self, *inputs):
        if self.distance_metric not in (_Metric.COSINE, _Metric.EUCLIDEAN, _Metric.MANHATTAN):
            return no_fused_form("distance_metric")
        return super().unfused_reason(*inputs)

    def fused(self, embeddings, labels):
        check_columns(embeddings, least=3, most=3)
        anchors, positives, negatives = embeddings
        if self.distance_metric is _Metric.EUCLIDEAN:
            return triplet_margin(anchors, positives, negatives, margin=self.triplet_margin)
        cosine = self.distance_metric is _Metric.COSINE
        distance = _cosine_distance if cosine else _manhattan_distance
        gap = distance(anchors, positives) - distance(anchors, negatives)
        return torch.relu(gap + self.triplet_margin).mean()


def _in_module_dtype(module, values):
    """The values in the 16-bit dtype of a module's parameters; otherwise unchanged."""
    if not isinstance(module, torch.nn.Module):
        return values
    tensors = itertools.chain(module.parameters(), module.buffers())
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), values.dtype)
    return values.to(dtype) if dtype.itemsize == 2 else values


def _cosine_distance(x, y):
    return 1 - paired_cosine_similarity(x, y)


def _manhattan_distance(x, y):
    return torch.linalg.vector_norm(as_float(x) - as_float(y), 1, dim=1)

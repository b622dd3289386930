"""Sentence-BERT's losses of paired rows: CosineSimilarityLoss, SoftmaxLoss, TripletLoss."""

import itertools
import types

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.autocast import without_autocast
from fastsim.integrations.dtypes import as_theirs, code_of, in_one_dtype
from fastsim.integrations.overrides import patched_attribute
from fastsim.integrations.sentence_transformers.fused import (
    Fused,
    check_columns,
    check_labels,
)
from fastsim.losses import triplet_margin
from fastsim.reduce import as_float
from fastsim.scores import paired_cosine_similarity

_their_softmax = theirs.SoftmaxLoss.forward
_FLAGS = tuple(f"concatenation_sent_{part}" for part in ("rep", "difference", "multiplication"))
_Metric = theirs.TripletDistanceMetric


class CosineSimilarityLoss(Fused, theirs.CosineSimilarityLoss):
    """Any loss function on the cosines of pairs; arguments as sentence-transformers' loss.

    Columns after two are ignored.
    """

    def fused(self, embeddings, labels):
        embeddings = embeddings[:2]
        check_columns(embeddings)
        labels = check_labels(self, labels, len(embeddings[0]))
        cosines = _as_it_meets(self.cos_score_transformation, paired_cosine_similarity(*embeddings))
        cosines = self.cos_score_transformation(cosines)
        labels = labels.to(torch.promote_types(cosines.dtype, torch.float32))
        return self.loss_fct(cosines, labels)


class SoftmaxLoss(Fused, theirs.SoftmaxLoss):
    """A classifier on (u; v; |u - v|; u v); arguments as sentence-transformers' loss.

    Each part meets its share of the weight: the concatenation of them is never made. The logits are
    made in float32 or more, under autocast too. A `classifier` other than a Linear with a bias has
    no fused form.
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
        known = plain and layer.bias is not None
        return super().unfused_option() if known else "classifier"

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns [u, v], each (N, D); labels of N classes or (N, classes)."""
        check_columns(embeddings, most=2)
        with without_autocast(embeddings[0].device.type):
            logits = self._logits(*map(as_float, in_one_dtype(*embeddings)))
        given = *embeddings, self.classifier.weight, labels
        if labels is None:
            owner = type(self), "logits"
            return embeddings, as_theirs(logits, owner, lambda: self._few(*given)[1], *given)
        if self.num_labels == 1 or labels.shape != logits.shape:
            labels = labels.view(-1)
        loss = self.loss_fct(_as_it_meets(self.loss_fct, logits), labels)
        owner = type(self), code_of(self.loss_fct)
        return as_theirs(loss, owner, lambda: self._few(*given), *given)

    def _logits(self, u, v):
        parts = [u, v] if self.concatenation_sent_rep else []
        if self.concatenation_sent_difference:
            parts.append((u - v).abs())
        if self.concatenation_sent_multiplication:
            parts.append(u * v)
        weight, logits = as_float(self.classifier.weight), as_float(self.classifier.bias)
        for part, share in zip(parts, weight.split(u.shape[1], 1), strict=True):
            logits = logits + torch.nn.functional.linear(part.to(weight.dtype), share)
        return logits

    def _few(self, u, v, _, labels):
        """Theirs of two rows: the loss, without labels (embeddings, logits)."""
        options = {name: getattr(self, name) for name in ("num_labels", "loss_fct", *_FLAGS)}
        given = types.SimpleNamespace(
            **options, classifier=self.classifier, model=lambda feature: feature
        )
        columns = [{"sentence_embedding": column.detach()[:2]} for column in (u, v)]
        return _their_softmax(given, columns, None if labels is None else labels[:2])


class TripletLoss(Fused, theirs.TripletLoss):
    """Triplet loss of paired rows; arguments as sentence-transformers' loss.

    At Euclidean distance 0 the gradient of that distance is 0, where theirs is NaN.
    """

    def unfused_option(self):
        known = self.distance_metric in (_Metric.COSINE, _Metric.EUCLIDEAN, _Metric.MANHATTAN)
        return super().unfused_option() if known else "distance_metric"

    def fused(self, embeddings, labels):
        check_columns(embeddings, fewest=3, most=3)
        anchors, positives, negatives = embeddings
        if self.distance_metric is _Metric.EUCLIDEAN:
            return triplet_margin(anchors, positives, negatives, margin=self.triplet_margin)
        cosine = self.distance_metric is _Metric.COSINE
        distance = _cosine_distance if cosine else _manhattan_distance
        gap = distance(anchors, positives) - distance(anchors, negatives)
        return torch.relu(gap + self.triplet_margin).mean()


def _as_it_meets(module, values):
    """The values in the dtype that a module with numbers of 16 bits meets there."""
    if not isinstance(module, torch.nn.Module):
        return values
    own = itertools.chain(module.parameters(), module.buffers())
    dtype = next((t.dtype for t in own if t.is_floating_point()), values.dtype)
    return values.to(dtype) if dtype.itemsize == 2 else values


def _cosine_distance(x, y):
    return 1 - paired_cosine_similarity(x, y)


def _manhattan_distance(x, y):
    return torch.linalg.vector_norm(as_float(x) - as_float(y), 1, dim=1)

"""The losses of rows against the weights of the classes, without the N x C matrix of scores."""

import torch
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import loss_and_miner_utils

import fastsim
from fastsim.autocast import joined
from fastsim.backends import pick
from fastsim.checks import check_range
from fastsim.integrations.overrides import no_fused_form
from fastsim.integrations.pytorch_metric_learning import unfused_reasons
from fastsim.integrations.pytorch_metric_learning.similarities import similarity
from fastsim.integrations.pytorch_metric_learning.their_dtype import TheirDtype
from fastsim.integrations.pytorch_metric_learning.their_reducers import (
    already_reduced,
    per_row,
    reduction,
)
from fastsim.pairs import as_ids
from fastsim.reduce import as_float, inverse, softplus
from fastsim.scores import paired_scores


class _ClassLoss(TheirDtype, unfused_reasons.Replacement):
    """compute_loss from embeddings, labels and the rows (C, D) of the classes."""

    by_anchors = False  # whether only the anchors of a miner's tuples count

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        # With missing labels or with references theirs raises.
        fits = labels is not None and ref_emb is embeddings and ref_labels is labels
        if not fits or self.is_unfused(embeddings, labels):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.cast_types(embeddings.dtype, embeddings.device)
        rows = self.class_rows()
        check_range("labels", labels, rows.shape[0])
        labels = as_ids(labels)  # as an index, uint8 would be a mask
        losses = self.loss_dict(embeddings, labels, indices_tuple)
        self.add_weight_regularization_to_loss_dict(losses, rows)
        return losses

    def loss_dict(self, embeddings, labels, indices_tuple):
        """The losses as a reducer takes them, weighted by how often a miner named their rows."""
        how = reduction(self) if indices_tuple is None else None
        if how is not None:
            losses = already_reduced(self.fused(embeddings, labels, how))
        else:
            weights = self.row_weights(embeddings, labels, indices_tuple)
            losses = per_row(self.fused(embeddings, labels, "none") * weights)
        return {"loss": losses}

    def row_weights(self, embeddings, labels, indices_tuple):
        """(N,) numbers up to 1: how often a miner named each row."""
        return loss_and_miner_utils.convert_to_weights(
            indices_tuple, labels, dtype=embeddings.dtype, using_ref=self.by_anchors
        )

    def unfused_reason(self, embeddings, labels):
        return (
            super().unfused_reason()
            or self.of_distance()
            or unfused_reasons.of_positive(self, *self.positive)
            or unfused_reasons.of_inputs(embeddings, labels, embeddings, labels)
        )

    def of_distance(self):
        """Why the distance has no fused form, or None."""
        return unfused_reasons.of_scores(self.distance, ("cosine", "dot"))

    def small_options(self, width):
        # Random weights would change the random numbers of the user's training.
        ones = {"weight_init_func": torch.nn.init.ones_}
        return {"num_classes": 2, "embedding_size": width} | ones

    def class_rows(self):
        """The rows (C, D) of the classes."""
        return self.W.t()

    def fused(self, embeddings, labels, reduction):
        """The losses (N,) of the rows, or their mean or sum."""
        raise NotImplementedError


class NormalizedSoftmaxLoss(_ClassLoss, theirs.NormalizedSoftmaxLoss, hooks=("get_logits",)):
    """`fastsim.info_nce` of a row with all classes; fused with every reducer."""

    positive = ("temperature",)

    def unfused_reason(self, *inputs):
        return unfused_reasons.of_cross_entropy(self) or super().unfused_reason(*inputs)

    def fused(self, embeddings, labels, reduction):
        kind, rows = similarity(self.distance), self.class_rows()
        if kind == "dot":  # theirs normalises the classes, whatever the distance
            rows = self.distance.normalize(rows)
        options = {"temperature": self.temperature, "similarity": kind}
        return fastsim.info_nce(embeddings, rows, labels, reduction=reduction, **options)


_ANGLES = ("get_cosine", "get_angles", "get_target_mask", "scale_logits")


class _AngularLoss(_ClassLoss):
    """A loss with a margin on the cosine or the angle of a row with its class."""

    positive = ("scale",)

    def unfused_reason(self, *inputs):
        if self.collect_stats:
            return "the statistics of the angles need their matrix"
        if not isinstance(self.margin, (int, float)):
            return no_fused_form("a margin that is not a number")
        return unfused_reasons.of_cross_entropy(self) or super().unfused_reason(*inputs)


class CosFaceLoss(
    _AngularLoss, theirs.CosFaceLoss, hooks=(*_ANGLES, "modify_cosine_of_target_classes")
):
    """`fastsim.info_nce` of a row with all classes, with a margin; fused with every reducer."""

    def fused(self, embeddings, labels, reduction):
        options = {"temperature": inverse(self.scale, embeddings), "reduction": reduction}
        rows = self.class_rows()
        return fastsim.info_nce(embeddings, rows, labels, margin=self.margin, **options)


class ArcFaceLoss(_AngularLoss, theirs.ArcFaceLoss, hooks=_ANGLES):
    """`fastsim.decoupled_contrastive` of a row with the other classes; fused with every reducer."""

    def unfused_reason(self, *inputs):
        if self.W.shape[1] == 1:
            return no_fused_form("a single class")
        return super().unfused_reason(*inputs)

    def fused(self, embeddings, labels, reduction):
        rows = self.class_rows()
        options = {"temperature": inverse(self.scale, embeddings), "reduction": "none"}
        others = fastsim.decoupled_contrastive(embeddings, rows, labels, **options)
        cosines = fastsim.paired_cosine_similarity(embeddings, rows[labels])
        # With S the sum over the other classes, z the logit and z' the logit with the margin,
        # log(S + e^z') - z' = softplus(log S - z'), and `others` is log S - z.
        with_margin = self.modify_cosine_of_target_classes(cosines)
        losses = softplus(others + self.scale * (cosines - with_margin))
        return losses if reduction == "none" else getattr(losses, reduction)()


class ProxyNCALoss(_ClassLoss, theirs.ProxyNCALoss, hooks=("nca_computation",)):
    """`fastsim.info_nce` of a row with all proxies; fused with every reducer.

    For squared distances of unit rows, the default, |x - y|^2 = 2 - 2 cos.
    """

    positive = ("softmax_scale",)
    by_anchors = True

    def of_distance(self):
        if self._is_squared():
            return unfused_reasons.of_changes(self.distance)
        return super().of_distance()

    def _is_squared(self):
        squared = type(self.distance) is LpDistance and self.distance.normalize_embeddings
        return squared and self.distance.p == self.distance.power == 2

    def class_rows(self):
        return self.proxies

    def fused(self, embeddings, labels, reduction):
        kind = similarity(self.distance) or "cosine"
        scale = self.softmax_scale * (2 if self._is_squared() else 1)
        options = {"temperature": inverse(scale, embeddings), "reduction": reduction}
        return fastsim.info_nce(embeddings, self.proxies, labels, similarity=kind, **options)


class ProxyAnchorLoss(_ClassLoss, theirs.ProxyAnchorLoss, hooks=("get_logits",)):
    """Each proxy against the batch; fused with every reducer, if alpha and margin are numbers.

    For the rows of other classes, log(1 + sum of exponentials) is `fastsim.info_nce` of the proxies
    with a zero row as positive, whose logit is 0. The rows of a proxy's own class are N pairs.
    """

    positive = ("alpha",)

    def unfused_reason(self, *inputs):
        numbers = unfused_reasons.of_numbers(self, "alpha", "margin")
        return numbers or super().unfused_reason(*inputs)

    def loss_dict(self, embeddings, labels, indices_tuple):
        offsets = as_float(self.row_weights(embeddings, labels, indices_tuple)) - 1
        positive = self.positive_losses(embeddings, labels, offsets)
        negative = self.negative_losses(embeddings, labels, offsets)
        present, classes = labels.unique().shape[0], positive.shape[0]
        return {
            "pos_loss": per_row(positive) | {"divisor": present},
            "neg_loss": per_row(negative) | {"divisor": classes},
        }

    def positive_losses(self, embeddings, labels, offsets):
        """(C,): log(1 + sum of exponentials) over the rows of each proxy's class."""
        x, y = as_float(embeddings), as_float(self.proxies[labels])
        scores = paired_scores(x, y, pick(None, embeddings), similarity(self.distance))
        logits = self.alpha * (self.margin - scores) + offsets
        order = labels.argsort(stable=True)
        lengths = labels.bincount(minlength=self.proxies.shape[0])

        def by_class(values, how):
            return torch.segment_reduce(values[order], how, lengths=lengths, axis=0, initial=0.0)

        with torch.no_grad():
            top = by_class(logits, "max")  # at least 0, the logit of the 1
        return top + torch.log(torch.exp(-top) + by_class(torch.exp(logits - top[labels]), "sum"))

    def negative_losses(self, embeddings, labels, offsets):
        """(C,): log(1 + sum of exponentials) over the rows of all other classes."""
        rows, classes = embeddings.shape[0], self.proxies.shape[0]
        columns = joined([embeddings, embeddings.new_zeros(1, embeddings.shape[1])])
        bias = torch.cat([self.alpha * self.margin + offsets, offsets.new_zeros(1)])
        ids = (
            torch.arange(classes, device=labels.device),
            torch.cat([labels, labels.new_full((1,), -1)]),
        )
        return fastsim.info_nce(
            self.proxies,
            columns,
            labels.new_full((classes,), rows),
            temperature=1 / self.alpha,
            exclude=ids,
            candidate_bias=bias,
            similarity=similarity(self.distance),
            reduction="none",
        )

    def class_rows(self):
        return self.proxies

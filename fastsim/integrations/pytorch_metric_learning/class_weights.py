"""The losses against a weight row of each class, without the N x C matrix of classes."""

import torch
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import loss_and_miner_utils

import fastsim
from fastsim.backends import pick
from fastsim.checks import check_range
from fastsim.integrations import overrides
from fastsim.integrations.pytorch_metric_learning import unsupported_reasons
from fastsim.integrations.pytorch_metric_learning.their_dtype import TheirDtype
from fastsim.reduce import as_float, softplus
from fastsim.scores import paired_scores


class _ClassLoss(TheirDtype, overrides.Hooked):
    """compute_loss from embeddings, labels and the rows (C, D) of the classes."""

    positive = ()  # names of numbers that the fused form wants above 0
    by_anchors = False  # whether a miner's tuples count as those of anchors alone

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        # Theirs raises where labels are missing or references are given.
        own = labels is not None and ref_emb is embeddings and ref_labels is labels
        reason = self.unsupported_reason(embeddings, labels) if own else None
        if not own or reason is not None:
            if reason is not None:
                unsupported_reasons.say_once(self, reason)
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.cast_types(embeddings.dtype, embeddings.device)
        rows = self.class_rows()
        check_range("labels", labels, rows.shape[0])
        found = self.loss_dict(embeddings, labels, indices_tuple)
        self.add_weight_regularization_to_loss_dict(found, rows)
        return found

    def loss_dict(self, embeddings, labels, indices_tuple):
        """The losses as a reducer takes them, weighted by how often a miner named their rows."""
        reduction = unsupported_reasons.reduction(self) if indices_tuple is None else None
        if reduction is not None:
            losses = unsupported_reasons.reduced(self.fused(embeddings, labels, reduction))
        else:
            weights = self.row_weights(embeddings, labels, indices_tuple)
            losses = unsupported_reasons.by_row(self.fused(embeddings, labels, "none") * weights)
        return {"loss": losses}

    def row_weights(self, embeddings, labels, indices_tuple):
        """(N,) numbers of at most 1: how often a miner named each row."""
        return loss_and_miner_utils.convert_to_weights(
            indices_tuple, labels, dtype=embeddings.dtype, using_ref=self.by_anchors
        )

    def unsupported_reason(self, embeddings, labels):
        """Why these have no fused form, or None."""
        return (
            unsupported_reasons.of_hooks(self)
            or self.of_distance()
            or unsupported_reasons.of_positive(self, *self.positive)
            or unsupported_reasons.of_inputs(embeddings, labels, embeddings, labels)
        )

    def of_distance(self):
        """Why its distance has no fused form, or None."""
        return unsupported_reasons.of_scores(self.distance, ("cosine", "dot"))

    def small_options(self, width):
        # Weights that are drawn would move the random numbers of whoever trains.
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

    def unsupported_reason(self, *given):
        return unsupported_reasons.of_cross_entropy(self) or super().unsupported_reason(*given)

    def fused(self, embeddings, labels, reduction):
        similarity, rows = unsupported_reasons.similarity(self.distance), self.class_rows()
        if (
            similarity == "dot"
        ):  # of embeddings alone: the classes of theirs are unit rows in any case
            rows = self.distance.normalize(rows)
        options = {"temperature": self.temperature, "similarity": similarity}
        return fastsim.info_nce(embeddings, rows, labels, reduction=reduction, **options)


_ANGLES = ("get_cosine", "get_angles", "get_target_mask", "scale_logits")


class _AngularLoss(_ClassLoss):
    """A margin on the cosine or the angle of a row with its own class."""

    positive = ("scale",)

    def unsupported_reason(self, *given):
        if self.collect_stats:
            return "the statistics of its angles are taken of the matrix"
        if not isinstance(self.margin, (int, float)):
            return "no fused form of a margin that is not a number"
        return unsupported_reasons.of_cross_entropy(self) or super().unsupported_reason(*given)


class CosFaceLoss(
    _AngularLoss, theirs.CosFaceLoss, hooks=(*_ANGLES, "modify_cosine_of_target_classes")
):
    """`fastsim.info_nce` of a row with all classes, with a margin; fused with every reducer."""

    def fused(self, embeddings, labels, reduction):
        options = {"temperature": 1 / self.scale, "margin": self.margin, "reduction": reduction}
        return fastsim.info_nce(embeddings, self.class_rows(), labels, **options)


class ArcFaceLoss(_AngularLoss, theirs.ArcFaceLoss, hooks=_ANGLES):
    """`fastsim.decoupled_contrastive` of a row with the other classes; fused with every reducer."""

    def unsupported_reason(self, *given):
        if self.W.shape[1] == 1:
            return "one class has no others"
        return super().unsupported_reason(*given)

    def fused(self, embeddings, labels, reduction):
        rows = self.class_rows()
        options = {"temperature": 1 / self.scale, "reduction": "none"}
        others = fastsim.decoupled_contrastive(embeddings, rows, labels, **options)
        cosines = fastsim.paired_cosine_similarity(embeddings, rows[labels])
        # log(sum of the others + e^z') - z' = softplus(log sum of the others - z'), where `others`
        # is log sum of the others - z, and z' = scale * moved is the logit with its margin.
        moved = self.modify_cosine_of_target_classes(cosines)
        losses = softplus(others + self.scale * (cosines - moved))
        return losses if reduction == "none" else getattr(losses, reduction)()


class ProxyNCALoss(_ClassLoss, theirs.ProxyNCALoss, hooks=("nca_computation",)):
    """`fastsim.info_nce` of a row with all proxies; fused with every reducer.

    With squared distances of unit rows, the default, |x - y|^2 = 2 - 2 cos.
    """

    positive = ("softmax_scale",)
    by_anchors = True

    def of_distance(self):
        if self._is_squared():
            return unsupported_reasons.of_changes(self.distance)
        return super().of_distance()

    def _is_squared(self):
        squared = type(self.distance) is LpDistance and self.distance.normalize_embeddings
        return squared and self.distance.p == self.distance.power == 2

    def class_rows(self):
        return self.proxies

    def fused(self, embeddings, labels, reduction):
        similarity = unsupported_reasons.similarity(self.distance) or "cosine"
        scale = self.softmax_scale * (2 if self._is_squared() else 1)
        options = {"temperature": 1 / scale, "similarity": similarity, "reduction": reduction}
        return fastsim.info_nce(embeddings, self.proxies, labels, **options)


class ProxyAnchorLoss(_ClassLoss, theirs.ProxyAnchorLoss, hooks=("get_logits",)):
    """Each proxy against the batch; fused with every reducer, where alpha and margin are numbers.

    Of the rows of other classes, log(1 + sum of exponentials) is `fastsim.info_nce` of the proxies
    with a zero row as positive, whose logit is 0. The rows of the proxy's own class are N pairs.
    """

    positive = ("alpha",)

    def unsupported_reason(self, *given):
        numbers = unsupported_reasons.of_numbers(self, "alpha", "margin")
        return numbers or super().unsupported_reason(*given)

    def loss_dict(self, embeddings, labels, indices_tuple):
        offsets = as_float(self.row_weights(embeddings, labels, indices_tuple)) - 1
        near = self.near(embeddings, labels, offsets)
        far = self.far(embeddings, labels, offsets)
        present, classes = labels.unique().shape[0], near.shape[0]
        return {
            "pos_loss": unsupported_reasons.by_row(near) | {"divisor": present},
            "neg_loss": unsupported_reasons.by_row(far) | {"divisor": classes},
        }

    def near(self, embeddings, labels, offsets):
        """(C,): log(1 + sum of exponentials) of the rows of the own class."""
        x, y = as_float(embeddings), as_float(self.proxies[labels])
        similarity = unsupported_reasons.similarity(self.distance)
        scores = paired_scores(x, y, pick(None, embeddings), similarity)
        logits = self.alpha * (self.margin - scores) + offsets
        order = labels.argsort(stable=True)
        lengths = labels.bincount(minlength=self.proxies.shape[0])

        def by_class(values, how):
            return torch.segment_reduce(values[order], how, lengths=lengths, axis=0, initial=0.0)

        with torch.no_grad():
            top = by_class(logits, "max")  # 0 at least, the logit of the 1
        return top + torch.log(torch.exp(-top) + by_class(torch.exp(logits - top[labels]), "sum"))

    def far(self, embeddings, labels, offsets):
        """(C,): log(1 + sum of exponentials) of the rows of other classes."""
        rows, classes = embeddings.shape[0], self.proxies.shape[0]
        columns = torch.cat([embeddings, embeddings.new_zeros(1, embeddings.shape[1])])
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
            similarity=unsupported_reasons.similarity(self.distance),
            reduction="none",
        )

    def class_rows(self):
        return self.proxies

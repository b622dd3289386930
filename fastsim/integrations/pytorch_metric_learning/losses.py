"""The losses of pairs and triplets, subclasses of theirs without the matrix wherever they can."""

from typing import NamedTuple

import torch
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning.utils import loss_and_miner_utils

import fastsim
from fastsim.backends import pick
from fastsim.integrations import names, overrides
from fastsim.integrations.pytorch_metric_learning import unsupported_reasons
from fastsim.integrations.pytorch_metric_learning.class_weights import (  # noqa: F401
    ArcFaceLoss,
    CosFaceLoss,
    NormalizedSoftmaxLoss,
    ProxyAnchorLoss,
    ProxyNCALoss,
)
from fastsim.integrations.pytorch_metric_learning.their_dtype import TheirDtype
from fastsim.reduce import as_float
from fastsim.scores import paired, unit_rows

HOOKS = ("_compute_loss", "mat_based_loss", "pair_based_loss", "_assert_either_pos_or_neg")
_SOFT_PLUS = torch.nn.Softplus(beta=1)
FEW = 1 << 20  # numbers that are few enough to be gathered whatever the size of the matrix


class _Memory(NamedTuple):
    """Stands for all pairs of a batch and a memory, in the place of indices that name them all.

    own: whether the batch is in the memory, from place `start` on and round the end.
    """

    own: bool
    start: int


class _PairLoss(TheirDtype, overrides.Hooked):
    """compute_loss from embeddings and labels, without a list of pairs."""

    similarities = ("cosine", "dot")  # that the fused form has

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        memory = isinstance(indices_tuple, _Memory)
        if not memory and unsupported_reasons.are_few(embeddings, ref_emb):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        reason = "only all pairs of the labels have a fused form, not listed ones"
        if indices_tuple is None or memory:
            reason = self.unsupported_reason(embeddings, labels, ref_emb, ref_labels)
        if reason is not None:
            unsupported_reasons.say_once(self, reason)
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        # As there, a batch given as its own references leaves out each row's pair with itself.
        own_first = ref_labels is labels
        if memory:
            # A copy in any case: the next batch will be written over the oldest.
            own_first, start = indices_tuple
            ref_emb, ref_labels = (t.roll(-start, 0) for t in (ref_emb, ref_labels))
        references = {"references": ref_emb, "reference_groups": ref_labels, "own_first": own_first}
        if own_first and ref_emb is embeddings:
            references = {}
        return {"loss": self.fused(embeddings, labels, references)}

    def unsupported_reason(self, embeddings, labels, ref_emb, ref_labels):
        """Why these have no fused form, or None."""
        return (
            unsupported_reasons.of_hooks(self)
            or unsupported_reasons.of_scores(self.distance, self.similarities)
            or unsupported_reasons.of_inputs(embeddings, labels, ref_emb, ref_labels)
        )

    def replaced_hook(self):
        """As `Hooked`; loss_method too, which is the one of their two ways that a loss takes."""
        method = getattr(self.loss_method, "__func__", None)
        shipped = self._originals[self.way]
        return super().replaced_hook() or (None if method is shipped else "loss_method")

    def fused(self, embeddings, labels, references):
        """The losses as a reducer takes them."""
        raise NotImplementedError


class NTXentLoss(_PairLoss, theirs.NTXentLoss, hooks=HOOKS):
    """`fastsim.nt_xent`; fused with MeanReducer (the default) and SumReducer."""

    way = "pair_based_loss"

    def unsupported_reason(self, *given):
        if unsupported_reasons.reduction(self) is None:
            return "a reducer of single pairs, other than the mean and the sum"
        positive = unsupported_reasons.of_positive(self, "temperature")
        return positive or super().unsupported_reason(*given)

    def fused(self, embeddings, labels, references):
        options = {
            "temperature": self.temperature,
            "similarity": unsupported_reasons.similarity(self.distance),
            "reduction": unsupported_reasons.reduction(self),
        }
        return unsupported_reasons.reduced(
            fastsim.nt_xent(embeddings, labels, **references, **options)
        )


class SupConLoss(_PairLoss, theirs.SupConLoss, hooks=HOOKS):
    """`fastsim.sup_con`, 0 where no row has a negative; fused with every reducer."""

    way = "mat_based_loss"

    def unsupported_reason(self, *given):
        positive = unsupported_reasons.of_positive(self, "temperature")
        return positive or super().unsupported_reason(*given)

    def fused(self, embeddings, labels, references):
        options = {"temperature": self.temperature, "reduction": "none"}
        options["similarity"] = unsupported_reasons.similarity(self.distance)
        losses = fastsim.sup_con(embeddings, labels, **references, **options)
        columns = references.get("reference_groups", labels)
        negatives = (labels != columns[0]).any() | (columns != columns[0]).any()
        return unsupported_reasons.by_row(torch.where(negatives, losses, 0.0))


class MultiSimilarityLoss(_PairLoss, theirs.MultiSimilarityLoss, hooks=HOOKS):
    """`fastsim.multi_similarity`; fused with every reducer, where its parameters are numbers."""

    way = "mat_based_loss"

    def unsupported_reason(self, *given):
        if any(isinstance(value, torch.Tensor) for value in (self.alpha, self.beta, self.base)):
            return "no fused form of parameters that are tensors"
        positive = unsupported_reasons.of_positive(self, "alpha", "beta")
        return positive or super().unsupported_reason(*given)

    def fused(self, embeddings, labels, references):
        reduction = unsupported_reasons.reduction(self)
        options = {"alpha": self.alpha, "beta": self.beta, "base": self.base}
        options["similarity"] = unsupported_reasons.similarity(self.distance)
        options["reduction"] = reduction or "none"
        losses = fastsim.multi_similarity(embeddings, labels, **references, **options)
        return (
            unsupported_reasons.by_row(losses)
            if reduction is None
            else unsupported_reasons.reduced(losses)
        )


class CircleLoss(_PairLoss, theirs.CircleLoss, hooks=HOOKS):
    """`fastsim.circle`; fused with every reducer, where its parameters are numbers."""

    way = "mat_based_loss"
    similarities = ("cosine",)

    def unsupported_reason(self, *given):
        reason = unsupported_reasons.of_numbers(self, "m", "gamma")
        if reason is not None:
            return reason
        of_m = {"op": 1 + self.m, "on": -self.m, "delta_p": 1 - self.m, "delta_n": self.m}
        changed = [name for name, value in of_m.items() if getattr(self, name) != value]
        if not overrides.is_plain(self.soft_plus, _SOFT_PLUS):
            changed.append("soft_plus")
        if changed:
            return f"{changed[0]} has been replaced"
        positive = unsupported_reasons.of_positive(self, "gamma")
        return positive or super().unsupported_reason(*given)

    def fused(self, embeddings, labels, references):
        options = {"margin": self.m, "gamma": self.gamma, "reduction": "none"}
        return unsupported_reasons.by_row(
            fastsim.circle(embeddings, labels, **references, **options)
        )


class TripletMarginLoss(TheirDtype, overrides.Hooked, theirs.TripletMarginLoss, hooks=()):
    """Distances of the triplets' own pairs; fused with every reducer.

    For batch-hard mining give it the triplets of `miners.BatchHardMiner`. All triplets of a batch,
    the default there, are a list longer than the matrix, and theirs.
    """

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        reason = self.unsupported_reason(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if reason is None:
            indices_tuple = loss_and_miner_utils.convert_to_triplets(
                indices_tuple, labels, ref_labels, t_per_anchor=self.triplets_per_anchor
            )
            if len(indices_tuple[0]) == 0:
                return self.zero_losses()
            named = len(indices_tuple[0]) * embeddings.shape[1]
            if named > max(FEW, embeddings.shape[0] * ref_emb.shape[0]):
                reason = "more triplets than a matrix of distances is large"
        if reason is not None:
            unsupported_reasons.say_once(self, reason)
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        losses = self.fused(embeddings, ref_emb, indices_tuple)
        return {"loss": {"losses": losses, "indices": indices_tuple, "reduction_type": "triplet"}}

    def unsupported_reason(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        """Why these have no fused form, or None."""
        if indices_tuple is None:
            if self.triplets_per_anchor == "all":
                return "all triplets of a batch are a list longer than its matrix of distances"
            if labels is None:
                return "neither labels nor triplets"
        if ref_emb.dtype != embeddings.dtype:
            return f"embeddings of {embeddings.dtype} against references of {ref_emb.dtype}"
        hooks = unsupported_reasons.of_hooks(self)
        return hooks or unsupported_reasons.of_distance(self.distance)

    def fused(self, embeddings, ref_emb, triplets):
        """The losses of the triplets."""
        rows = _points(self.distance, embeddings)
        columns = rows if ref_emb is embeddings else _points(self.distance, ref_emb)
        anchors, positives, negatives = (
            side[index] for side, index in zip((rows, columns, columns), triplets, strict=True)
        )
        near = _distances(self.distance, anchors, positives)
        far = _distances(self.distance, anchors, negatives)
        if self.swap:
            between = _distances(self.distance, positives, negatives)
            far = self.distance.smallest_dist(far, between)
        violation = self.distance.margin(near, far) + self.margin
        soft = torch.nn.functional.softplus
        return soft(violation) if self.smooth_loss else torch.relu(violation)


def _points(distance, embeddings):
    """The rows between which a distance is taken."""
    if distance.normalize_embeddings:
        return unit_rows(embeddings, pick(None, embeddings))
    return as_float(embeddings)


def _distances(distance, x, y):
    """Of paired rows; at distance 0 the gradient is 0."""
    if unsupported_reasons.is_cosine(distance):
        values = paired(x, y)
    else:
        values = torch.linalg.vector_norm(x - y, dim=1)
    return _to_power(values, distance.power)


def _to_power(values, power):
    """values**power, with the gradient 0 at 0, where that of a power below 1 is infinite."""
    return values if power == 1 else torch.where(values == 0, 0.0, values) ** power


class CrossBatchMemory(overrides.Hooked, theirs.CrossBatchMemory, hooks=()):
    """A memory of past embeddings, its pairs with the batch decided by labels instead of listed."""

    def create_indices_tuple(
        self,
        embeddings,
        labels,
        E_mem,  # noqa: N803
        L_mem,  # noqa: N803
        input_indices_tuple,
        do_remove_self_comparisons,
    ):
        """Which pairs of batch and memory count: described if the loss is fused, else listed."""
        listed = self.miner or input_indices_tuple is not None or self.replaced_hook()
        listed = listed or unsupported_reasons.are_few(embeddings, E_mem)
        if isinstance(self.loss, _PairLoss) and not listed:
            reason = self.loss.unsupported_reason(embeddings, labels, E_mem, L_mem)
            if reason is None:
                start = (self.queue_idx - len(self.curr_batch_idx)) % self.memory_size
                return _Memory(do_remove_self_comparisons, start)
        return super().create_indices_tuple(
            embeddings, labels, E_mem, L_mem, input_indices_tuple, do_remove_self_comparisons
        )


__getattr__, __dir__, __all__ = names.served(__name__, theirs)

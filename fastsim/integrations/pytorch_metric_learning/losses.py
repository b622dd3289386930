"""The losses of pairs and triplets: subclasses of theirs that avoid the matrix where possible."""

from typing import NamedTuple

import torch
from pytorch_metric_learning import losses as theirs
from pytorch_metric_learning.utils import loss_and_miner_utils

import fastsim
from fastsim.autocast import joined
from fastsim.backends import pick
from fastsim.integrations import names, overrides
from fastsim.integrations.overrides import replaced
from fastsim.integrations.pytorch_metric_learning import unfused_reasons
from fastsim.integrations.pytorch_metric_learning.class_weights import (  # noqa: F401
    ArcFaceLoss,
    CosFaceLoss,
    NormalizedSoftmaxLoss,
    ProxyAnchorLoss,
    ProxyNCALoss,
)
from fastsim.integrations.pytorch_metric_learning.similarities import is_cosine, similarity
from fastsim.integrations.pytorch_metric_learning.their_dtype import TheirDtype
from fastsim.integrations.pytorch_metric_learning.their_reducers import (
    already_reduced,
    per_row,
    reduction,
)
from fastsim.reduce import as_float
from fastsim.scores import paired, unit_rows

HOOKS = ("_compute_loss", "mat_based_loss", "pair_based_loss", "_assert_either_pos_or_neg")
_SOFT_PLUS = torch.nn.Softplus(beta=1)
FEW = 1 << 20  # numbers that may always be gathered, however small the matrix is


class _MemoryPairs(NamedTuple):
    """All pairs of a batch and a memory, without indices that list them.

    has_batch: whether the memory holds the batch, from position `start` on, wrapping at its end.
    """

    has_batch: bool
    start: int


class _PairLoss(TheirDtype, unfused_reasons.Replacement):
    """compute_loss from embeddings and labels, without a list of pairs."""

    similarities = ("cosine", "dot")  # those with a fused form

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        memory = isinstance(indices_tuple, _MemoryPairs)
        if not memory and unfused_reasons.are_few(embeddings, ref_emb):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        listed = not (indices_tuple is None or memory)
        if self.is_unfused(embeddings, labels, ref_emb, ref_labels, listed):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        # As in theirs, a batch given as its own references leaves out each row's pair with itself.
        own_first = ref_labels is labels
        if memory:
            # Copies: the next batch will overwrite the oldest rows.
            own_first, start = indices_tuple
            ref_emb, ref_labels = (joined([t[start:], t[:start]]) for t in (ref_emb, ref_labels))
        references = {"references": ref_emb, "reference_groups": ref_labels, "own_first": own_first}
        if own_first and ref_emb is embeddings:
            references = {}
        return {"loss": self.fused(embeddings, labels, references)}

    def unfused_reason(self, embeddings, labels, ref_emb, ref_labels, listed=False):
        """listed: whether the pairs are given as a list."""
        if listed:
            return "pairs that are listed have no fused form, only all pairs of the labels have one"
        return (
            self.option_reason()
            or super().unfused_reason()
            or unfused_reasons.of_scores(self.distance, self.similarities)
            or unfused_reasons.of_inputs(embeddings, labels, ref_emb, ref_labels)
        )

    def option_reason(self):
        """Why the options of the loss have no fused form, or None."""
        return unfused_reasons.of_positive(self, *self.positive)

    def replaced_hook(self):
        """As in `Hooked`; also loss_method, which has to be the method named by `way`."""
        method = getattr(self.loss_method, "__func__", None)
        shipped = self._originals[self.way]
        return super().replaced_hook() or (None if method is shipped else "loss_method")

    def fused(self, embeddings, labels, references):
        """The losses as a reducer takes them."""
        raise NotImplementedError


class NTXentLoss(_PairLoss, theirs.NTXentLoss, hooks=HOOKS):
    """`fastsim.nt_xent`; fused with MeanReducer (the default) and SumReducer."""

    way, positive = "pair_based_loss", ("temperature",)

    def option_reason(self):
        if reduction(self) is None:
            return "a reducer other than the mean and the sum has no fused form"
        return super().option_reason()

    def fused(self, embeddings, labels, references):
        options = {
            "temperature": self.temperature,
            "similarity": similarity(self.distance),
            "reduction": reduction(self),
        }
        return already_reduced(fastsim.nt_xent(embeddings, labels, **references, **options))


class SupConLoss(_PairLoss, theirs.SupConLoss, hooks=HOOKS):
    """`fastsim.sup_con`, 0 if no row has a negative; fused with every reducer."""

    way, positive = "mat_based_loss", ("temperature",)

    def fused(self, embeddings, labels, references):
        options = {"temperature": self.temperature, "reduction": "none"}
        options["similarity"] = similarity(self.distance)
        losses = fastsim.sup_con(embeddings, labels, **references, **options)
        columns = references.get("reference_groups", labels)
        negatives = (labels != columns[0]).any() | (columns != columns[0]).any()
        return per_row(torch.where(negatives, losses, 0.0))


class MultiSimilarityLoss(_PairLoss, theirs.MultiSimilarityLoss, hooks=HOOKS):
    """`fastsim.multi_similarity`; fused with every reducer, if its parameters are numbers."""

    way, positive = "mat_based_loss", ("alpha", "beta")

    def option_reason(self):
        if any(isinstance(value, torch.Tensor) for value in (self.alpha, self.beta, self.base)):
            return "parameters that are tensors have no fused form"
        return super().option_reason()

    def fused(self, embeddings, labels, references):
        how = reduction(self)
        options = {"alpha": self.alpha, "beta": self.beta, "base": self.base}
        options["similarity"] = similarity(self.distance)
        options["reduction"] = how or "none"
        losses = fastsim.multi_similarity(embeddings, labels, **references, **options)
        return per_row(losses) if how is None else already_reduced(losses)


class CircleLoss(_PairLoss, theirs.CircleLoss, hooks=HOOKS):
    """`fastsim.circle`; fused with every reducer, if its parameters are numbers."""

    way, positive = "mat_based_loss", ("gamma",)
    similarities = ("cosine",)

    def option_reason(self):
        reason = unfused_reasons.of_numbers(self, "m", "gamma")
        if reason is not None:
            return reason
        derived = {"op": 1 + self.m, "on": -self.m, "delta_p": 1 - self.m, "delta_n": self.m}
        changed = [name for name, value in derived.items() if getattr(self, name) != value]
        if not overrides.is_plain(self.soft_plus, _SOFT_PLUS):
            changed.append("soft_plus")
        return replaced(changed[0]) if changed else super().option_reason()

    def fused(self, embeddings, labels, references):
        options = {"margin": self.m, "gamma": self.gamma, "reduction": "none"}
        return per_row(fastsim.circle(embeddings, labels, **references, **options))


class TripletMarginLoss(
    TheirDtype, unfused_reasons.Replacement, theirs.TripletMarginLoss, hooks=()
):
    """Only the distances of the triplets' pairs; fused with every reducer.

    For batch-hard mining give it the triplets of `miners.BatchHardMiner`. All triplets of a batch,
    the default in theirs, are a list longer than the matrix, and computed by their code.
    """

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        if self.is_unfused(embeddings, labels, indices_tuple, ref_emb):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        triplets = loss_and_miner_utils.convert_to_triplets(
            indices_tuple, labels, ref_labels, t_per_anchor=self.triplets_per_anchor
        )
        if len(triplets[0]) == 0:
            return self.zero_losses()
        size = len(triplets[0]) * embeddings.shape[1]
        if size > max(FEW, embeddings.shape[0] * ref_emb.shape[0]):
            reason = "the triplets need more memory than the matrix of distances"
            overrides.warn_once(self, reason, self._package)
            return super().compute_loss(embeddings, labels, triplets, ref_emb, ref_labels)
        losses = self.fused(embeddings, ref_emb, triplets)
        return {"loss": {"losses": losses, "indices": triplets, "reduction_type": "triplet"}}

    def unfused_reason(self, embeddings, labels, indices_tuple, ref_emb):
        if indices_tuple is None:
            if self.triplets_per_anchor == "all":
                return "all triplets of a batch need more memory than its matrix of distances"
            if labels is None:
                return "there are neither labels nor triplets"
        if ref_emb.dtype != embeddings.dtype:
            return unfused_reasons.of_dtypes(embeddings, ref_emb)
        return super().unfused_reason() or unfused_reasons.of_distance(self.distance)

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
    """The rows between which distances are taken."""
    if distance.normalize_embeddings:
        return unit_rows(embeddings, pick(None, embeddings))
    return as_float(embeddings)


def _distances(distance, x, y):
    """Distances (N,) of paired rows; at distance 0 the gradient is 0."""
    values = paired(x, y) if is_cosine(distance) else torch.linalg.vector_norm(x - y, dim=1)
    return _to_power(values, distance.power)


def _to_power(values, power):
    """values**power with gradient 0 at 0, where a power below 1 has an infinite one."""
    return values if power == 1 else torch.where(values == 0, 0.0, values) ** power


class CrossBatchMemory(overrides.Hooked, theirs.CrossBatchMemory, hooks=()):
    """A memory of past embeddings; its pairs with the batch follow from labels, without a list."""

    def create_indices_tuple(
        self,
        embeddings,
        labels,
        E_mem,  # noqa: N803
        L_mem,  # noqa: N803
        input_indices_tuple,
        do_remove_self_comparisons,
    ):
        """The pairs of batch and memory: `_MemoryPairs` if the loss is fused, else their list."""
        listed = self.miner or input_indices_tuple is not None or self.replaced_hook()
        listed = listed or unfused_reasons.are_few(embeddings, E_mem)
        if isinstance(self.loss, _PairLoss) and not listed:
            reason = self.loss.unfused_reason(embeddings, labels, E_mem, L_mem)
            if reason is None:
                start = (self.queue_idx - len(self.curr_batch_idx)) % self.memory_size
                return _MemoryPairs(do_remove_self_comparisons, start)
        return super().create_indices_tuple(
            embeddings, labels, E_mem, L_mem, input_indices_tuple, do_remove_self_comparisons
        )


__getattr__, __dir__, __all__ = names.forwarding(__name__, theirs)

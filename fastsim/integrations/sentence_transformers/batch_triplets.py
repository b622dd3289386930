"""The four triplet losses over one labelled column (fastsim.losses.batch_hard_triplet and others).

Rows without a positive and batches of one class give the values of sentence-transformers.
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.overrides import no_fused_form
from fastsim.integrations.sentence_transformers.fused import Fused, class_labels, lookup
from fastsim.losses import batch_all_triplet, batch_semi_hard_triplet, hardest_pairs
from fastsim.reduce import softplus

_Distance = theirs.BatchHardTripletLossDistanceFunction
DISTANCES = {
    _Distance.euclidean_distance: "euclidean",
    _Distance.cosine_distance: "cosine",
}


class _OneColumn(Fused):
    """A loss of one column; `of_column(embeddings, labels, distance)` computes it.

    The model's attribute is `model`. Under their name, `sentence_embedder`, a trainer does not find
    it when it wraps the model for several devices, and gradients are then not synchronised. State
    dicts have their name, and are read with either.
    """

    @property
    def sentence_embedder(self):
        return self.model

    def __setattr__(self, name, value):
        super().__setattr__("model" if name == "sentence_embedder" else name, value)

    def state_dict(self, *args, **options):
        """As theirs: the keys of the model begin with `sentence_embedder`."""
        state = super().state_dict(*args, **options)
        _rename(state, options.get("prefix", ""), "model", "sentence_embedder")
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args):
        _rename(state_dict, prefix, "sentence_embedder", "model")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, sentence_features, labels):
        """The loss of the first tokenized column, with class labels."""
        return super().forward(list(sentence_features), labels)

    def unfused_reason(self, *inputs):
        if lookup(DISTANCES, self.distance_metric) is None:
            return no_fused_form("distance_metric")
        return super().unfused_reason(*inputs)

    def fused(self, embeddings, labels):
        column = embeddings[0]
        labels = class_labels(self, labels, len(column))
        return self.of_column(column, labels, DISTANCES[self.distance_metric])


def _rename(state, prefix, old, new):
    """Renames the keys of a state dict that begin with prefix + old; their order is kept."""
    tables = state, getattr(state, "_metadata", {})
    for table, dot in zip(tables, (".", ""), strict=True):
        for key in list(table):
            value = table.pop(key)
            if key.startswith(f"{prefix}{old}{dot}"):
                key = prefix + new + key[len(prefix + old) :]
            table[key] = value


def _hardest_gap(embeddings, labels, distance):
    """Distance of each row's hardest positive minus that of its hardest negative (N,).

    As in sentence-transformers, a row without a positive has distance 0 to it. In a batch of one
    class theirs takes the largest plus the smallest distance of the row for the negative, the row
    itself included, so that the largest cancels with the positive.
    """
    hardest = hardest_pairs(embeddings, labels, distance=distance)
    # Compared by value, not by index: a NaN has no index on some backends, and must reach the loss.
    positive = hardest.positive.masked_fill(hardest.positive == -torch.inf, 0.0)
    to_itself = _distances_to_itself(embeddings, distance).to(positive.dtype)
    one_class = torch.maximum(positive, to_itself) + to_itself
    return positive - torch.where(hardest.negative == torch.inf, one_class, hardest.negative)


def _distances_to_itself(embeddings, distance):
    """Distances of the rows to themselves (N,): 0, but 1 for the cosine of a zero row."""
    if distance == "cosine":
        return ~embeddings.any(1)
    return torch.zeros_like(embeddings[:, 0])


class BatchHardTripletLoss(
    _OneColumn, theirs.BatchHardTripletLoss, hooks=("batch_hard_triplet_loss",)
):
    """Farthest positive, nearest negative; arguments as sentence-transformers' loss."""

    def of_column(self, embeddings, labels, distance):
        gap = _hardest_gap(embeddings, labels, distance)
        return torch.relu(gap + self.triplet_margin).mean()


class BatchHardSoftMarginTripletLoss(
    _OneColumn,
    theirs.BatchHardSoftMarginTripletLoss,
    hooks=("batch_hard_triplet_soft_margin_loss",),
):
    """BatchHardTripletLoss with a soft margin; arguments as sentence-transformers' loss."""

    def of_column(self, embeddings, labels, distance):
        return softplus(_hardest_gap(embeddings, labels, distance)).mean()


class _WithMargin(_OneColumn):
    """A loss with a margin, the attribute `margin_name`, that is fused if it is not learnt."""

    margin_name = "triplet_margin"

    def unfused_reason(self, *inputs):
        margin = getattr(self, self.margin_name)
        if isinstance(margin, torch.Tensor) and margin.requires_grad:
            return no_fused_form(self.margin_name)
        return super().unfused_reason(*inputs)

    def margin_number(self):
        """The margin as a number."""
        return float(getattr(self, self.margin_name))


class BatchSemiHardTripletLoss(
    _WithMargin, theirs.BatchSemiHardTripletLoss, hooks=("batch_semi_hard_triplet_loss",)
):
    """Semi-hard negatives; arguments as sentence-transformers' loss.

    A batch of one class is computed by their code, which takes 0 for the missing distances.
    """

    margin_name = "margin"

    def of_column(self, embeddings, labels, distance):
        if (labels == labels[0]).all():
            return self.batch_semi_hard_triplet_loss(labels, embeddings)
        options = {"margin": self.margin_number(), "distance": distance}
        return batch_semi_hard_triplet(embeddings, labels, **options)


class BatchAllTripletLoss(
    _WithMargin, theirs.BatchAllTripletLoss, hooks=("batch_all_triplet_loss",)
):
    """All triplets; arguments as sentence-transformers' loss."""

    def of_column(self, embeddings, labels, distance):
        options = {"margin": self.margin_number(), "distance": distance}
        return batch_all_triplet(embeddings, labels, **options)

"""The four triplet losses over one labelled column (fastsim.losses.batch_hard_triplet and beside).

For rows without a positive, and batches of one class, the value is that of sentence-transformers.
"""

import torch
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.sentence_transformers.fused import Fused, class_labels, of_theirs
from fastsim.losses import batch_all_triplet, batch_semi_hard_triplet, hardest_pairs
from fastsim.reduce import softplus

_Distance = theirs.BatchHardTripletLossDistanceFunction
DISTANCES = {
    _Distance.euclidean_distance: "euclidean",
    _Distance.cosine_distance: "cosine",
}


class _OneColumn(Fused):
    """A loss of one column; `of_column(embeddings, labels, distance)` computes it.

    The model is under `model`: under another name, as theirs, a trainer does not find it when it
    wraps the model for several devices, whose gradients then are not synchronised. In state dicts
    it has their name, and is read under both.
    """

    @property
    def sentence_embedder(self):
        return self.model

    def __setattr__(self, name, value):
        super().__setattr__("model" if name == "sentence_embedder" else name, value)

    def state_dict(self, *args, **options):
        """As theirs: the model's entries begin with `sentence_embedder`."""
        state = super().state_dict(*args, **options)
        _rename(state, options.get("prefix", ""), "model", "sentence_embedder")
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args):
        _rename(state_dict, prefix, "sentence_embedder", "model")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, sentence_features, labels):
        """The loss of the first tokenized column, with class labels."""
        return super().forward(list(sentence_features), labels)

    def unfused_option(self):
        known = of_theirs(DISTANCES, self.distance_metric)
        return super().unfused_option() if known else "distance_metric"

    def fused(self, embeddings, labels):
        column = embeddings[0]
        labels = class_labels(self, labels, len(column))
        return self.of_column(column, labels, DISTANCES[self.distance_metric])


def _rename(state, prefix, old, new):
    """Entries of a state dict under prefix + old come under prefix + new, in their place."""
    tables = state, getattr(state, "_metadata", {})
    for table, dot in zip(tables, (".", ""), strict=True):
        for key in list(table):
            value = table.pop(key)
            if key.startswith(f"{prefix}{old}{dot}"):
                key = prefix + new + key[len(prefix + old) :]
            table[key] = value


def _hardest_gap(embeddings, labels, distance):
    """How much farther each row's hardest positive is than its hardest negative (N,).

    As theirs, a row without a positive has the distance 0 to it. In a batch of one class the
    negative is as far as the farthest and the nearest row together, each row being one of its own:
    the farthest is the positive too, and cancels.
    """
    hardest = hardest_pairs(embeddings, labels, distance=distance)
    # Not by their indices: a NaN has none on every backend, and has to reach the loss.
    positive = hardest.positive.masked_fill(hardest.positive == -torch.inf, 0.0)
    own = _own_distances(embeddings, distance).to(positive.dtype)
    of_one_class = torch.maximum(positive, own) + own
    return positive - torch.where(hardest.negative == torch.inf, of_one_class, hardest.negative)


def _own_distances(embeddings, distance):
    """Of the rows to themselves (N,): 0, but 1 of a zero row, whose cosine with any row is 0."""
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
    """The same with a soft margin; arguments as sentence-transformers' loss."""

    def of_column(self, embeddings, labels, distance):
        return softplus(_hardest_gap(embeddings, labels, distance)).mean()


class _WithMargin(_OneColumn):
    """A loss whose margin, the attribute `margin_name`, has a fused form as a number."""

    margin_name = "triplet_margin"

    def unfused_option(self):
        margin = getattr(self, self.margin_name)
        learnt = isinstance(margin, torch.Tensor) and margin.requires_grad
        return self.margin_name if learnt else super().unfused_option()

    def margin_number(self):
        """The margin as a number."""
        return float(getattr(self, self.margin_name))


class BatchSemiHardTripletLoss(
    _WithMargin, theirs.BatchSemiHardTripletLoss, hooks=("batch_semi_hard_triplet_loss",)
):
    """Semi-hard negatives; arguments as sentence-transformers' loss.

    In a batch of one class their code computes the loss; it takes 0 for the missing distances.
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

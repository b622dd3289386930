"""The batch-hard miner without the matrix of distances."""

import torch
from pytorch_metric_learning import miners as theirs

import fastsim
from fastsim.integrations import names
from fastsim.integrations.pytorch_metric_learning import unfused_reasons
from fastsim.integrations.pytorch_metric_learning.similarities import is_cosine

HOOKS = ("get_positives", "get_negatives", "get_mine_function", "get_max_per_row")
HOOKS += ("get_min_per_row", "get_x_per_row", "set_stats")


class BatchHardMiner(unfused_reasons.Replacement, theirs.BatchHardMiner, hooks=HOOKS):
    """Each anchor's hardest positive and negative; without allowed ranges and statistics fused."""

    def mine(self, embeddings, labels, ref_emb, ref_labels):
        """(anchors, positives, negatives) of the rows that have a positive and a negative."""
        if self.is_unfused(embeddings, labels, ref_emb, ref_labels):
            return super().mine(embeddings, labels, ref_emb, ref_labels)
        distance = "cosine" if is_cosine(self.distance) else "euclidean"
        own_first = ref_labels is labels
        references = {}
        if not (own_first and ref_emb is embeddings):
            ref_emb = self.distance.maybe_normalize(ref_emb)
            references = {"references": ref_emb, "reference_groups": ref_labels}
            references["own_first"] = own_first
        rows = self.distance.maybe_normalize(embeddings)
        hardest = fastsim.hardest_pairs(rows, labels, **references, distance=distance)
        if torch.stack([hardest.positive, hardest.negative]).isnan().any():
            # A NaN may have no index. Theirs makes it reach the loss.
            return super().mine(embeddings, labels, ref_emb, ref_labels)
        positives, negatives = hardest.positive_index, hardest.negative_index
        anchors = torch.where((positives >= 0) & (negatives >= 0))[0]
        return anchors, positives[anchors], negatives[anchors]

    def unfused_reason(self, embeddings, labels, ref_emb, ref_labels):
        if self.collect_stats:
            return "the statistics of a miner need the matrix of distances"
        if self.allowed_pos_range is not None or self.allowed_neg_range is not None:
            return "allowed ranges have no fused form"
        if (self.pos_strategy, self.neg_strategy) != (self.HARD, self.HARD):
            return "other strategies than the hardest have no fused form"
        return (
            super().unfused_reason()
            or unfused_reasons.of_distance(self.distance)
            or unfused_reasons.of_order(self.distance)
            or unfused_reasons.of_inputs(embeddings, labels, ref_emb, ref_labels)
        )


__getattr__, __dir__, __all__ = names.forwarding(__name__, theirs)

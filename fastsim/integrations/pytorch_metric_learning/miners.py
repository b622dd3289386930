"""The batch-hard miner without the matrix of distances."""

import torch
from pytorch_metric_learning import miners as theirs

import fastsim
from fastsim.integrations.pytorch_metric_learning import unsupported_reasons


def __getattr__(name):
    """Every name that is not here is theirs."""
    return getattr(theirs, name)


class BatchHardMiner(theirs.BatchHardMiner):
    """Each anchor's hardest positive and negative; fused without allowed ranges and statistics."""

    def mine(self, embeddings, labels, ref_emb, ref_labels):
        """(anchors, positives, negatives) of the rows that have both."""
        reason = self.unsupported_reason(embeddings, labels, ref_emb, ref_labels)
        if reason is not None:
            unsupported_reasons.say_once(self, reason)
            return super().mine(embeddings, labels, ref_emb, ref_labels)
        distance = "cosine" if unsupported_reasons.is_cosine(self.distance) else "euclidean"
        own_first = ref_labels is labels
        references = {}
        if not (own_first and ref_emb is embeddings):
            ref_emb = self.distance.maybe_normalize(ref_emb)
            references = {"references": ref_emb, "reference_groups": ref_labels}
            references["own_first"] = own_first
        rows = self.distance.maybe_normalize(embeddings)
        hardest = fastsim.hardest_pairs(rows, labels, **references, distance=distance)
        positives, negatives = hardest.positive_index, hardest.negative_index
        anchors = torch.where((positives >= 0) & (negatives >= 0))[0]
        return anchors, positives[anchors], negatives[anchors]

    def unsupported_reason(self, embeddings, labels, ref_emb, ref_labels):
        """Why these have no fused form, or None."""
        if self.collect_stats:
            return "the statistics of a miner are taken of the matrix of distances"
        if self.allowed_pos_range is not None or self.allowed_neg_range is not None:
            return "no fused form of allowed ranges"
        given = unsupported_reasons.of_inputs(embeddings, labels, ref_emb, ref_labels)
        return unsupported_reasons.of_distance(self.distance) or given

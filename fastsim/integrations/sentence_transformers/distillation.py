"""Distillation of a teacher's scores of given pairs: DistillKLDivLoss, MarginMSELoss.

A query is scored against its own documents alone, so there is no matrix. What costs time is the
normalisation of both sides of every pair: their `pairwise_cos_sim` becomes that of this module.
Another `similarity_fct`, their default `pairwise_dot_score` among them, stays what it is: there is
nothing between a product and its sum to be saved. Over all pairs of a batch: `fastsim.distill`.
"""

import copy

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.sentence_transformers.fused import Fused
from fastsim.scores import paired_cosine_similarity


def pairwise_cos_sim(a, b):
    """Cosines (N,) of paired rows a, b (N, D), in float32 or more; else by their function."""
    if not (a.is_floating_point() and a.dtype == b.dtype and a.dim() == 2 and len(a)):
        return util.pairwise_cos_sim(a, b)
    if a.is_sparse or b.is_sparse:
        return util.pairwise_cos_sim(a, b)
    return paired_cosine_similarity(a, b)


class _Paired(Fused):
    """Mixed in before a loss whose `similarity_fct` scores paired rows."""

    def __setattr__(self, name, value):
        """Their cosines become ours whenever they are set."""
        if name == "similarity_fct" and value is util.pairwise_cos_sim:
            value = pairwise_cos_sim
        super().__setattr__(name, value)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of [queries, positives, *negatives], each (N, D), by their code."""
        loss = super(Fused, self).compute_loss_from_embeddings(embeddings, labels)
        if self.similarity_fct is not pairwise_cos_sim:
            return loss

        def few(*rows):
            peer = copy.copy(self)
            vars(peer)["similarity_fct"] = util.pairwise_cos_sim
            return super(Fused, peer).compute_loss_from_embeddings(list(rows), labels[:2])

        return self.in_their_dtype(loss, few, embeddings)


class DistillKLDivLoss(_Paired, theirs.DistillKLDivLoss):
    """KL divergence of a teacher's softmax over a query's documents from the model's.

    Arguments as sentence-transformers'. With `similarity_fct=util.pairwise_cos_sim` the cosines are
    fused.
    """


class MarginMSELoss(_Paired, theirs.MarginMSELoss):
    """Squared error of margins against a teacher's; arguments as sentence-transformers'.

    With `similarity_fct=util.pairwise_cos_sim` the cosines are fused.
    """

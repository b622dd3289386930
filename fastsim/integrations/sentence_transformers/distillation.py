"""Distillation of a teacher's scores of given pairs: DistillKLDivLoss, MarginMSELoss.

A query is scored with its own documents only, so there is no matrix to save. What costs time is to
normalise both sides of every pair, so their `pairwise_cos_sim` is replaced by the function here.
Any other `similarity_fct`, such as the default `pairwise_dot_score`, is kept: it has nothing to
fuse. `fastsim.distill` learns from all pairs of a batch.
"""

import copy

from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as theirs

from fastsim.integrations.function_attribute import FunctionAttribute
from fastsim.integrations.sentence_transformers.fused import Fused
from fastsim.scores import paired_cosine_similarity


def pairwise_cos_sim(a, b):
    """Cosines (N,) of paired rows a, b (N, D), in float32 or more.

    Theirs computes other shapes, dtypes and layouts.
    """
    alike = a.is_floating_point() and (a.dtype, a.shape) == (b.dtype, b.shape) and a.dim() == 2
    if not alike or a.is_sparse or b.is_sparse:
        return util.pairwise_cos_sim(a, b)
    return paired_cosine_similarity(a, b)


class _PairScores(FunctionAttribute, Fused):
    """Mixed in before a loss whose `similarity_fct` scores paired rows."""

    function_attribute = "similarity_fct"

    @staticmethod
    def fused_function(function):
        return pairwise_cos_sim if function is util.pairwise_cos_sim else function

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of [queries, positives, *negatives], each (N, D), by their code."""
        loss = super(Fused, self).compute_loss_from_embeddings(embeddings, labels)
        if self.similarity_fct is not pairwise_cos_sim:
            return loss

        def theirs_on_rows(*rows):
            peer = copy.copy(self)
            vars(peer)["similarity_fct"] = util.pairwise_cos_sim
            return super(Fused, peer).compute_loss_from_embeddings(list(rows), labels[:2])

        return self.in_their_dtype(loss, theirs_on_rows, embeddings, labels)


class DistillKLDivLoss(_PairScores, theirs.DistillKLDivLoss):
    """KL divergence of a teacher's softmax over a query's documents from the model's.

    Arguments as sentence-transformers' loss. With `similarity_fct=util.pairwise_cos_sim` the
    cosines are fused.
    """


class MarginMSELoss(_PairScores, theirs.MarginMSELoss):
    """Squared error of margins against a teacher's; arguments as sentence-transformers' loss.

    With `similarity_fct=util.pairwise_cos_sim` the cosines are fused.
    """

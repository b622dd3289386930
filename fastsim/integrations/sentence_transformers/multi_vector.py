"""The multi-vector (late-interaction) losses of sentence-transformers 6 over fused MaxSim scores.

    from fastsim.integrations.sentence_transformers import multi_vector as losses

    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)

Each is a subclass of the loss of that name in sentence_transformers.multi_vector_encoder.losses,
with its arguments and defaults. Only the scoring is replaced: their ColBERT functions, such as the
default `similarity_fct`, by those of the same names here, which hold no
(queries, documents, tokens, tokens) tensor. Other score functions (XTR) and all other names of the
module are theirs.
"""

import functools

from sentence_transformers.multi_vector_encoder import losses as theirs
from sentence_transformers.multi_vector_encoder import scoring

from fastsim.integrations import names
from fastsim.integrations.function_attribute import FunctionAttribute
from fastsim.integrations.sentence_transformers.fused import lookup
from fastsim.integrations.sentence_transformers.their_module import InTheirModule
from fastsim.integrations.token_masks import can_be_fused, weighted
from fastsim.token_scores import max_sim

EMPTY_DOCUMENT = -1e9  # their score of a document without tokens


def _fused(their_scores, score, dimensions):
    """Our function in the place of one of theirs.

    score(queries, documents, queries_mask, documents_mask, average) computes the scores of tensors
    of so many dimensions with masks of integers or bool. Theirs computes everything else.
    """
    average = their_scores.__kwdefaults__ or {}
    average = their_scores.__defaults__[-1] if not average else average["length_normalize"]

    @functools.wraps(their_scores)
    def scores(
        queries_embeddings,
        documents_embeddings,
        queries_mask=None,
        documents_mask=None,
        chunk_elements=None,
        length_normalize=average,
    ):
        sides, masks = (queries_embeddings, documents_embeddings), (queries_mask, documents_mask)
        if not can_be_fused(sides, masks, dimensions):
            return their_scores(*sides, *masks, chunk_elements, length_normalize)
        pairs = zip(sides, masks, strict=True)
        masks = [(side != 0).any(-1) if m is None else m for side, m in pairs]
        queries, kept = weighted(queries_embeddings, masks[0])
        sides = queries, documents_embeddings
        return score(*sides, kept, masks[1].bool(), bool(length_normalize))

    # pickle finds the function by these.
    scores.__module__, scores.__qualname__ = __name__, scores.__name__
    return scores


def _max_sim(queries, documents, queries_mask, documents_mask, average):
    scores = max_sim(queries, documents, queries_mask, documents_mask, similarity="dot")
    scores = scores.masked_fill(~documents_mask.any(-1), EMPTY_DOCUMENT)
    return scores / queries_mask.sum(1, keepdim=True).clamp(min=1) if average else scores


def _every_pair(queries, documents, queries_mask, documents_mask, average):
    flat = documents.flatten(0, 1), queries_mask, documents_mask.flatten(0, 1)
    return _max_sim(queries, *flat, average)


def _one_document(queries, documents, queries_mask, documents_mask, average):
    one_each = documents[:, None], queries_mask, documents_mask[:, None]
    return _max_sim(queries, *one_each, average)[:, 0]


_SCORES = {
    "colbert_scores": (_every_pair, (3, 4)),
    "colbert_kd_scores": (_max_sim, (3, 4)),
    "colbert_scores_pairwise": (_one_document, (3, 3)),
}
_OURS = {}  # their function -> ours
for _name, _how in _SCORES.items():
    for _prefix in ("", "mean_"):
        _their = getattr(scoring, f"{_prefix}{_name}")
        _OURS[_their] = _fused(_their, *_how)

colbert_scores = _OURS[scoring.colbert_scores]
colbert_kd_scores = _OURS[scoring.colbert_kd_scores]
colbert_scores_pairwise = _OURS[scoring.colbert_scores_pairwise]
mean_colbert_scores = _OURS[scoring.mean_colbert_scores]
mean_colbert_kd_scores = _OURS[scoring.mean_colbert_kd_scores]
mean_colbert_scores_pairwise = _OURS[scoring.mean_colbert_scores_pairwise]


class _FusedScores(FunctionAttribute, InTheirModule):
    """Mixed in before a loss of theirs: its ColBERT scores are replaced by ours."""

    function_attribute = "similarity_fct"

    @staticmethod
    def fused_function(function):
        return lookup(_OURS, function, function)


class MultiVectorMultipleNegativesRankingLoss(
    _FusedScores, theirs.MultiVectorMultipleNegativesRankingLoss
):
    """InfoNCE over MaxSim scores with in-batch and hard negatives; arguments as theirs."""


class CachedMultiVectorMultipleNegativesRankingLoss(
    _FusedScores, theirs.CachedMultiVectorMultipleNegativesRankingLoss
):
    """The ranking loss with embeddings made in mini-batches (GradCache); arguments as theirs."""


class MultiVectorDistillKLDivLoss(_FusedScores, theirs.MultiVectorDistillKLDivLoss):
    """KL divergence of a teacher's softmax over a query's documents from the model's.

    Arguments as theirs.
    """


class MultiVectorMarginMSELoss(_FusedScores, theirs.MultiVectorMarginMSELoss):
    """Squared error of the margins between positive and negatives; arguments as theirs."""


__getattr__, __dir__, __all__ = names.forwarding(__name__, theirs)

"""PyLate's ColBERT scores and losses without the tensor of all pairs of tokens.

    from fastsim.integrations import pylate as losses

    loss = losses.Contrastive(model)

For version 1.6. `Contrastive`, `CachedContrastive` and `Distillation` are subclasses of the losses
of those names in pylate.losses, with their arguments. Their ColBERT scores, the default, are
replaced by the functions here; other scores (XTR) and all other names are PyLate's.

A masked token of a document takes part in the maximum with a score of 0, as in PyLate's backend
`torch`; its backends `lik` and `flash` leave the token out. If `backend` or PYLATE_SCORES_BACKEND
names any backend but "auto", PyLate's code computes the scores.
"""
# ruff: noqa: E402

import os

from fastsim.integrations import names

names.check_version("pylate", 1, 6)

from pylate import losses as theirs
from pylate import scores as their_scores

from fastsim.integrations.function_attribute import FunctionAttribute
from fastsim.integrations.token_masks import can_be_fused, weighted
from fastsim.token_scores import max_sim


def colbert_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    """MaxSim of queries (Q, Lq, D) with documents (C, Ld, D): (Q, C).

    backend: None or "auto"; with any other PyLate's code computes the scores.
    """
    sides, masks = (queries_embeddings, documents_embeddings), (queries_mask, documents_mask)
    if not _is_auto(backend) or not can_be_fused(sides, masks, (3, 3)):
        return their_scores.colbert_scores(*sides, *masks, backend=backend)
    return _max_sim(*sides, *masks)


def colbert_kd_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    """MaxSim of each query with its own documents (Q, N, Ld, D): (Q, N); backend as above."""
    sides, masks = (queries_embeddings, documents_embeddings), (queries_mask, documents_mask)
    fused = _is_auto(backend) and can_be_fused(sides, masks, (3, 4))
    if not fused or len(queries_embeddings) != len(documents_embeddings):
        return their_scores.colbert_kd_scores(*sides, *masks, backend=backend)
    return _max_sim(*sides, *masks)


class ColBERTScores(their_scores.ColBERTScores):
    """MaxSim of queries (Q, Lq, D) with documents (B, N, Ld, D): (Q, B * N), query by query."""

    def __call__(
        self,
        queries_embeddings,
        documents_embeddings,
        queries_mask=None,
        documents_mask=None,
        backend=None,
    ):
        sides, masks = (queries_embeddings, documents_embeddings), (queries_mask, documents_mask)
        if not _is_auto(backend) or not can_be_fused(sides, masks, (3, 4)):
            return super().__call__(*sides, *masks, backend=backend)
        documents = documents_embeddings.flatten(0, 1)
        mask = None if documents_mask is None else documents_mask.flatten(0, 1)
        return _max_sim(queries_embeddings, documents, queries_mask, mask)


class _FusedScores(FunctionAttribute):
    """Mixed in before a loss of theirs: its ColBERT scores are replaced by ours."""

    function_attribute = "score_metric"

    @staticmethod
    def fused_function(function):
        if type(function) is their_scores.ColBERTScores and not vars(function):
            return ColBERTScores()
        if function is their_scores.colbert_scores:
            return colbert_scores
        return colbert_kd_scores if function is their_scores.colbert_kd_scores else function


class Contrastive(_FusedScores, theirs.Contrastive):
    """InfoNCE over MaxSim scores with in-batch and hard negatives; arguments as theirs."""


class CachedContrastive(_FusedScores, theirs.CachedContrastive):
    """Contrastive with embeddings made in mini-batches (GradCache); arguments as theirs."""


class Distillation(_FusedScores, theirs.Distillation):
    """KL divergence of a teacher's softmax over a query's documents from the model's.

    Arguments as theirs.
    """


def _is_auto(backend):
    """Whether no backend is named; the variable is read at every call, as PyLate does."""
    named = backend or os.environ.get("PYLATE_SCORES_BACKEND") or "auto"
    return named.lower() == "auto"


def _max_sim(queries, documents, queries_mask, documents_mask):
    if documents_mask is not None:
        documents = documents * documents_mask[..., None].to(documents.dtype)
    if queries_mask is not None:
        queries, queries_mask = weighted(queries, queries_mask)
    return max_sim(queries, documents, queries_mask, similarity="dot").to(queries.dtype)


__getattr__, __dir__, __all__ = names.forwarding(__name__, theirs)

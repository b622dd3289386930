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

import torch
from pylate import losses as theirs
from pylate import scores as their_scores

from fastsim.integrations.function_attribute import FunctionAttribute
from fastsim.token_scores import max_sim


def colbert_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    """MaxSim of queries (Q, Lq, D) with documents (C, Ld, D): (Q, C).

    backend: None or "auto"; with any other PyLate's code computes the scores.
    """
    inputs = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    if not _is_auto(backend) or not _can_be_fused(*inputs):
        return their_scores.colbert_scores(*inputs, backend=backend)
    return _max_sim(*inputs)


def colbert_kd_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    """MaxSim of each query with its own documents (Q, N, Ld, D): (Q, N); backend as above."""
    inputs = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    if not _is_auto(backend) or not _can_be_fused(*inputs):
        return their_scores.colbert_kd_scores(*inputs, backend=backend)
    return _max_sim(*inputs)


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
        inputs = queries_embeddings, documents_embeddings, queries_mask, documents_mask
        if not _is_auto(backend) or not _can_be_fused(*inputs):
            return super().__call__(*inputs, backend=backend)
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


def _can_be_fused(queries, documents, queries_mask, documents_mask):
    """Whether these are non-empty tensors of one floating dtype, with masks that are no weights."""
    masks = [mask for mask in (queries_mask, documents_mask) if mask is not None]
    if not all(isinstance(value, torch.Tensor) for value in (queries, documents, *masks)):
        return False
    if any(mask.is_floating_point() for mask in masks):
        return False
    if not (queries.numel() and documents.numel()):
        return False
    return queries.is_floating_point() and queries.dtype == documents.dtype


def _max_sim(queries, documents, queries_mask, documents_mask):
    if documents_mask is not None:
        documents = documents * documents_mask[..., None].to(documents.dtype)
    mask = None if queries_mask is None else queries_mask.bool()
    return max_sim(queries, documents, mask, similarity="dot").to(queries.dtype)


__getattr__, __dir__, __all__ = names.forwarding(__name__, theirs)

"""PyLate's ColBERT scores and losses without the tensor of all pairs of tokens.

    from fastsim.integrations import pylate as losses

    loss = losses.Contrastive(model)

Of version 1.6: `Contrastive`, `CachedContrastive` and `Distillation` are subclasses of the losses
of those names in pylate.losses, with their arguments; their ColBERT scores, the default, become
those here. A score of another kind (XTR) stays what it is, and so does every other name of theirs.

A token that a document's mask leaves out takes part in the maximum as a zero, as in their `torch`
backend; their `lik` and `flash` leave it out. Those are asked for as there, by `backend` or by
PYLATE_SCORES_BACKEND: whatever is not "auto" is scored by their code.
"""
# ruff: noqa: E402

import os

from fastsim.integrations import names

names.check_version("pylate", 1, 6)

import torch
from pylate import losses as theirs
from pylate import scores as their_scores

from fastsim.token_scores import max_sim


def colbert_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    """MaxSim of queries (Q, Lq, D) with documents (C, Ld, D): (Q, C).

    backend: None or "auto"; another asks for one of theirs, by their code.
    """
    given = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    if not _is_ours(backend) or not _are_tensors(*given):
        return their_scores.colbert_scores(*given, backend=backend)
    return _scored(*given)


def colbert_kd_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    """MaxSim of each query with its own documents (Q, N, Ld, D): (Q, N); backend as above."""
    given = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    if not _is_ours(backend) or not _are_tensors(*given):
        return their_scores.colbert_kd_scores(*given, backend=backend)
    return _scored(*given)


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
        given = queries_embeddings, documents_embeddings, queries_mask, documents_mask
        if not _is_ours(backend) or not _are_tensors(*given):
            return super().__call__(*given, backend=backend)
        documents = documents_embeddings.flatten(0, 1)
        mask = None if documents_mask is None else documents_mask.flatten(0, 1)
        return _scored(queries_embeddings, documents, queries_mask, mask)


class _Scored:
    """Mixed in before a loss of theirs: its ColBERT scores are ours."""

    def __setattr__(self, name, value):
        """Theirs become ours whenever they are set."""
        super().__setattr__(name, _in_place_of(value) if name == "score_metric" else value)


class Contrastive(_Scored, theirs.Contrastive):
    """InfoNCE over MaxSim scores with in-batch and hard negatives; arguments as theirs."""


class CachedContrastive(_Scored, theirs.CachedContrastive):
    """The same with embeddings made in mini-batches (GradCache); arguments as theirs."""


class Distillation(_Scored, theirs.Distillation):
    """KL divergence of a teacher's softmax over a query's documents from the model's.

    Arguments as theirs.
    """


def _in_place_of(score):
    """Our ColBERT score in the place of one of theirs; another stays what it is."""
    if type(score) is their_scores.ColBERTScores and not vars(score):
        return ColBERTScores()
    for theirs_, ours in (
        (their_scores.colbert_scores, colbert_scores),
        (their_scores.colbert_kd_scores, colbert_kd_scores),
    ):
        if score is theirs_:
            return ours
    return score


def _is_ours(backend):
    """Whether nobody asks for a backend of theirs; the variable is read at every call, as there."""
    asked = backend or os.environ.get("PYLATE_SCORES_BACKEND") or "auto"
    return asked.lower() == "auto"


def _are_tensors(queries, documents, queries_mask, documents_mask):
    """Whether these are tensors of one floating dtype, with masks whose weights are 0 and 1.

    Not those without an element, whose scores are none or 0.
    """
    masks = [mask for mask in (queries_mask, documents_mask) if mask is not None]
    if not all(isinstance(value, torch.Tensor) for value in (queries, documents, *masks)):
        return False
    whole = all(not mask.is_floating_point() for mask in masks)
    whole = whole and all(side.numel() for side in (queries, documents))
    return whole and queries.is_floating_point() and queries.dtype == documents.dtype


def _scored(queries, documents, queries_mask, documents_mask):
    if documents_mask is not None:
        documents = documents * documents_mask[..., None].to(documents.dtype)
    mask = None if queries_mask is None else queries_mask.bool()
    return max_sim(queries, documents, mask, similarity="dot").to(queries.dtype)


__getattr__, __dir__, __all__ = names.served(__name__, theirs)

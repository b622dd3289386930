"""The multi-vector (late-interaction) losses of sentence-transformers 6 over fused MaxSim scores.

    from fastsim.integrations.sentence_transformers import multi_vector as losses

    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)

Each is a subclass of the loss of that name in sentence_transformers.multi_vector_encoder.losses,
with its arguments and defaults. What is replaced is the scoring: their ColBERT functions, among
them the default `similarity_fct`, become those of the same names here, which hold no
(queries, documents, tokens, tokens) tensor. Any other callable (XTR) stays what it is, and so does
every other name of that module.
"""

import functools

import torch
from sentence_transformers.multi_vector_encoder import losses as theirs
from sentence_transformers.multi_vector_encoder import scoring

from fastsim.integrations import names
from fastsim.integrations.sentence_transformers.fused import of_theirs
from fastsim.integrations.sentence_transformers.their_module import InTheirModule
from fastsim.reduce import as_float
from fastsim.token_scores import max_sim

EMPTY_DOCUMENT = -1e9  # their score of a document without tokens


def _fused(their_scores, form):
    """A function in the place of one of theirs.

    form(queries, documents, their masks, average) -> scores of tensors; anything else than tensors
    with masks of integers or bool is handed to theirs.
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
        if not _are_served(sides, masks):
            return their_scores(*sides, *masks, chunk_elements, length_normalize)
        pairs = zip(sides, masks, strict=True)
        masks = [(side != 0).any(-1) if m is None else m.bool() for side, m in pairs]
        return as_float(form(*sides, *masks, bool(length_normalize)))

    # By these it is pickled.
    scores.__module__, scores.__qualname__ = __name__, scores.__name__
    return scores


def _are_served(sides, masks):
    """Whether these are tensors of one floating dtype on one device, and their masks."""
    tensors = [*sides, *(mask for mask in masks if mask is not None)]
    if not all(isinstance(t, torch.Tensor) and t.device == tensors[0].device for t in tensors):
        return False
    alike = sides[0].dtype == sides[1].dtype and sides[0].is_floating_point()
    whole = all(t.numel() for t in sides) and sides[0].dim() == 3
    # A mask of floats is a weight of each token there.
    return alike and whole and not any(t.is_floating_point() for t in tensors[2:])


def _scored(queries, documents, queries_mask, documents_mask, average):
    documents, documents_mask = documents.contiguous(), documents_mask.contiguous()
    scores = max_sim(queries, documents, queries_mask, documents_mask, similarity="dot")
    scores = scores.masked_fill(~documents_mask.any(-1), EMPTY_DOCUMENT)
    return scores / queries_mask.sum(1, keepdim=True).clamp(min=1) if average else scores


def _every_pair(queries, documents, queries_mask, documents_mask, average):
    flat = documents.flatten(0, 1), queries_mask, documents_mask.flatten(0, 1)
    return _scored(queries, *flat, average)


def _one_document(queries, documents, queries_mask, documents_mask, average):
    own = documents[:, None], queries_mask, documents_mask[:, None]
    return _scored(queries, *own, average)[:, 0]


_FORMS = {
    "colbert_scores": _every_pair,
    "colbert_kd_scores": _scored,
    "colbert_scores_pairwise": _one_document,
}
_OURS = {}
for _name, _form in _FORMS.items():
    for _prefix in ("", "mean_"):
        _their = getattr(scoring, f"{_prefix}{_name}")
        _OURS[_their] = _fused(_their, _form)

colbert_scores = _OURS[scoring.colbert_scores]
colbert_kd_scores = _OURS[scoring.colbert_kd_scores]
colbert_scores_pairwise = _OURS[scoring.colbert_scores_pairwise]
mean_colbert_scores = _OURS[scoring.mean_colbert_scores]
mean_colbert_kd_scores = _OURS[scoring.mean_colbert_kd_scores]
mean_colbert_scores_pairwise = _OURS[scoring.mean_colbert_scores_pairwise]


class _Scored(InTheirModule):
    """Mixed in before a loss of theirs: its ColBERT scores are ours."""

    def __setattr__(self, name, value):
        """Theirs become ours whenever they are set."""
        ours = of_theirs(_OURS, value, value) if name == "similarity_fct" else value
        super().__setattr__(name, ours)


class MultiVectorMultipleNegativesRankingLoss(
    _Scored, theirs.MultiVectorMultipleNegativesRankingLoss
):
    """InfoNCE over MaxSim scores with in-batch and hard negatives; arguments as theirs."""


class CachedMultiVectorMultipleNegativesRankingLoss(
    _Scored, theirs.CachedMultiVectorMultipleNegativesRankingLoss
):
    """The same with embeddings made in mini-batches (GradCache); arguments as theirs."""


class MultiVectorDistillKLDivLoss(_Scored, theirs.MultiVectorDistillKLDivLoss):
    """KL divergence of a teacher's softmax over a query's documents from the model's.

    Arguments as theirs.
    """


class MultiVectorMarginMSELoss(_Scored, theirs.MultiVectorMarginMSELoss):
    """Squared error of the margins between positive and negatives; arguments as theirs."""


__getattr__, __dir__, __all__ = names.served(__name__, theirs)

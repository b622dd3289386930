"""Late interaction: InfoNCE over MaxSim scores of sets of tokens, the loss of ColBERT and ColPali.

    L_i = log sum_c exp(S_ic / temperature) - S_{i, pos_i} / temperature
    S_ic = sum_{q in query i} max_{d in document c} q . d

`late_interaction_distillation` has a teacher's scores T_ij of the documents instead of positives:

    L_i = temperature^2 sum_j p_ij (log p_ij - log s_ij)
    s_i = softmax_j(S_ij / temperature),  p_i = softmax_j(T_ij / teacher_temperature)

Source: Khattab and Zaharia 2020, "ColBERT", equation 3 and section 3.4; in-batch negatives and
distillation: Santhanam et al. 2022, "ColBERTv2", section 3.3; images: Faysse et al. 2024,
"ColPali", equations 1 and 2; the factor temperature^2: Hinton et al. 2015, "Distilling the
Knowledge in a Neural Network", section 2. With one token per text it is `info_nce`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastsim.annotations import Exclude, Group, Reduction, Scalar, Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.checks import (
    FLOATING,
    INTEGRAL,
    check_alike,
    check_device,
    check_flags,
    check_number,
    check_reduction,
    check_similarity,
    check_tensor,
)
from fastsim.distributed import batchwise, join, learnt_number
from fastsim.losses.info_nce import info_nce_from_scores
from fastsim.losses.module import LossModule
from fastsim.pairs import global_exclude, global_positives, parse_exclude, parse_positives
from fastsim.precision import compute_dtype
from fastsim.reduce import reduce
from fastsim.token_scores import max_sim
from fastsim.tokens import check_mask, check_some_token, check_tokens


@embeddings_in_autocast("queries", "documents")
@batchwise
def late_interaction(
    queries: Tensor,
    documents: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 1.0,
    similarity: Similarity = "cosine",
    average: bool = False,
    symmetric: bool = False,
    exclude: Exclude = None,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """InfoNCE over MaxSim scores, with in-batch and hard negatives.

    For models with one vector per token or image patch. For one vector per text use `info_nce`; if
    a teacher has scored the documents use `late_interaction_distillation`. The loss takes
    embeddings, so `fastsim.grad_cache.GradCache` can encode in micro-batches that are padded to one
    length.

    Formula and source: fastsim/losses/late_interaction.py.

    Args:
        queries: token embeddings (B, Lq, D).
        documents: token embeddings (C, Ld, D), C >= B without `positives`. Documents that are no
            query's positive are hard negatives; without `positives` they follow the B positives.
            For N documents per query, (B, N, Ld, D), pass `documents.flatten(0, 1)` with positives
            `N * torch.arange(B)`.
        query_mask: (B, Lq) bool, False for padding; None: every row is a token.
        document_mask: (C, Ld) bool, likewise. A positive must have a token; another document
            without tokens is left out. A query without tokens has score 0 with every document.
        positives: (B,) integers, the document of each query; None: `arange(B)`.
        temperature: a positive number or tensor of one, which may require a gradient. Scores are
            sums over the tokens of a query, so 1 suits about 32 tokens; with `average` try 0.02.
        similarity: "cosine", or "dot" for dot products, for example of embeddings of norm 1.
        average: whether to average over the tokens of a query instead of summing.
        symmetric: whether to average the cross entropy with that of the positives over the queries.
        exclude: (row_ids (B,), column_ids (C,)), integers. A document with the id of the query is
            left out unless it is its positive (duplicates, known false negatives).
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch; see
            `fastsim.distributed`. Lq and Ld may differ between ranks. Documents are gathered, so a
            `Ring` is refused.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (B,) for reduction "none"; float64 for float64, else float32.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> tokens = torch.stack([torch.eye(2), -torch.eye(2)])
        >>> fastsim.late_interaction(tokens, tokens)  # scores 2 and 0: log(e^2 + 1) - 2
        tensor(0.1269)
    """
    _check_sides(
        queries,
        documents,
        query_mask,
        document_mask,
        similarity,
        average,
        reduction,
        empty=group is not None,
    )
    if positives is None and documents.shape[0] < queries.shape[0]:
        raise ValueError(
            f"documents: wanted at least {queries.shape[0]}, one per query, got"
            f" {documents.shape[0]}"
        )
    tensors = queries, documents, query_mask, document_mask, positives, temperature, exclude
    chosen = pick(backend, *tensors, kind="max_sim", group=group)
    check_number("temperature", temperature, positive=True)
    check_flags(symmetric=symmetric)
    own = queries.shape[0], documents.shape[0], queries.device
    positives, ids = parse_positives(positives, *own), parse_exclude(exclude, *own)
    check_some_token("document_mask", document_mask, positives)
    scored = {"similarity": similarity, "average": average, "backend": chosen.name}
    options = {"temperature": temperature, "symmetric": symmetric}
    # Only the first token of each text is passed: ranks may pad to different lengths.
    batch = join(
        group,
        "late_interaction",
        queries[:, 0],
        documents[:, 0],
        length=documents.shape[1],
        **options,
        **scored,
        exclude=exclude,
        reduction=reduction,
    )
    batch.refuse_ring("late_interaction gathers documents")
    documents, document_mask = _gathered(documents, document_mask, batch)
    if queries.shape[0]:
        scores = max_sim(queries, documents, query_mask, document_mask, **scored)
    else:
        scores = _no_scores(queries, documents)
    positives = global_positives(positives, batch)
    row_ids, column_ids = global_exclude(ids, batch)
    if symmetric:  # the softmax of a column runs over the queries of all ranks
        scores, positives = batch.gather_rows(scores), batch.gather_rows(positives)
        row_ids = batch.gather_rows(row_ids)
    if scores.shape[0] == 0:  # learnt inputs have to take part in the backward pass of all ranks
        return batch.reduce((scores / temperature).sum(1), reduction)
    exclude = None if row_ids is None else (row_ids, column_ids)
    losses = late_interaction_from_scores(
        scores, positives, **options, exclude=exclude, reduction="none"
    )
    return batch.reduce(losses, reduction)


class LateInteraction(LossModule):
    """The module of `late_interaction`."""

    function = staticmethod(late_interaction)

    def __init__(
        self,
        *,
        temperature: Scalar = 1.0,
        similarity: Similarity = "cosine",
        average: bool = False,
        symmetric: bool = False,
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def late_interaction_from_scores(
    scores: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 1.0,
    symmetric: bool = False,
    exclude: Exclude = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `late_interaction` for MaxSim scores (B, C) of `fastsim.max_sim`.

    The other parameters are the same: positives (B,), exclude ((B,), (C,)).
    """
    options = {"temperature": temperature, "symmetric": symmetric, "exclude": exclude}
    return info_nce_from_scores(scores, positives, **options, reduction=reduction)


@embeddings_in_autocast("queries", "documents")
def late_interaction_distillation(
    queries: Tensor,
    documents: Tensor,
    teacher_scores: Tensor,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    *,
    temperature: Scalar = 1.0,
    teacher_temperature: float | None = None,
    similarity: Similarity = "cosine",
    average: bool = False,
    reduction: Reduction = "mean",
    backend: str | None = None,
) -> Tensor:
    """KL(p || q) for each query: p is the softmax of a teacher's scores, q of the MaxSim scores.

    For documents that a cross-encoder has scored. If only the positive is known, use
    `late_interaction`. Rows are independent, so several processes need no `group`.

    Formula and source: fastsim/losses/late_interaction.py.

    Args:
        queries: token embeddings (B, Lq, D).
        documents: token embeddings (B, N, Ld, D), N >= 2 documents for each query; or (C, Ld, D),
            C >= 2 documents that are scored with every query.
        teacher_scores: (B, N) or (B, C), any real numbers; they get no gradient.
        query_mask: (B, Lq) bool, False for padding; None: every row is a token.
        document_mask: bool, the shape of `documents` without D. Every document must have a token.
        temperature: a positive number or tensor of one that divides the scores; the loss is
            multiplied by its square.
        teacher_temperature: a positive number that divides the teacher's scores; None:
            `temperature`.
        similarity, average, backend: as in `late_interaction`.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (B,) for reduction "none"; float64 for float64, else float32.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> tokens = torch.stack([torch.eye(2), -torch.eye(2)])
        >>> fastsim.late_interaction_distillation(tokens, tokens, torch.zeros(2, 2))
        tensor(0.4338)
    """
    own = isinstance(documents, Tensor) and documents.dim() == 4
    dimensions = 4 if own else 3
    checked = query_mask, document_mask, similarity, average, reduction
    _check_sides(queries, documents, *checked, dimensions=dimensions)
    temperature = learnt_number(temperature)
    check_number("temperature", temperature, positive=True)
    if teacher_temperature is not None:
        check_number("teacher_temperature", teacher_temperature, positive=True, tensor=False)
    dtypes, what = (*FLOATING, *INTEGRAL), "real numbers"
    check_tensor("teacher_scores", teacher_scores, ndim=2, dtypes=dtypes, what=what)
    check_device("teacher_scores", teacher_scores, "queries", queries)
    count = documents.shape[1 if own else 0]
    if count < 2:
        raise ValueError(f"documents: wanted at least 2{' of each query' * own}, got {count}")
    wanted = queries.shape[0], count
    if teacher_scores.shape != wanted:
        raise ValueError(
            f"teacher_scores: wanted shape {wanted}, a score of each document, got"
            f" {tuple(teacher_scores.shape)}"
        )
    check_some_token("document_mask", document_mask)
    tensors = queries, documents, query_mask, document_mask, teacher_scores, temperature
    chosen = pick(backend, *tensors, kind="max_sim")
    options = {"similarity": similarity, "average": average, "backend": chosen.name}
    scores = max_sim(queries, documents, query_mask, document_mask, **options)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(scores.dtype)
    if teacher_temperature is None:
        teacher_temperature = temperature
    teacher = teacher_scores.detach()
    teacher = teacher.to(torch.promote_types(teacher.dtype, scores.dtype))
    teacher = torch.log_softmax(teacher / teacher_temperature, 1)
    if isinstance(teacher_temperature, Tensor):
        teacher = teacher.detach()
    student = torch.log_softmax(scores / temperature, 1)
    terms = torch.nn.functional.kl_div(
        student, teacher.to(student.dtype), reduction="none", log_target=True
    )
    return reduce(terms.sum(1) * temperature**2, reduction)


class LateInteractionDistillation(LossModule):
    """The module of `late_interaction_distillation`."""

    function = staticmethod(late_interaction_distillation)

    def __init__(
        self,
        *,
        temperature: Scalar = 1.0,
        teacher_temperature: float | None = None,
        similarity: Similarity = "cosine",
        average: bool = False,
        reduction: Reduction = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def _check_sides(
    queries,
    documents,
    query_mask,
    document_mask,
    similarity,
    average,
    reduction,
    dimensions=3,
    empty=False,
):
    check_tokens("queries", queries, None, empty=empty)
    check_tokens("documents", documents, None, dimensions=dimensions, empty=empty)
    check_alike("documents", documents, "queries", queries)
    check_mask("query_mask", query_mask, "queries", queries)
    check_mask("document_mask", document_mask, "documents", documents)
    check_similarity(similarity)
    check_flags(average=average)
    check_reduction(reduction)


def _no_scores(queries, documents):
    """Scores (0, C) of a rank without queries, so that documents get their gradient from others."""
    dtype = compute_dtype(queries)
    return queries.to(dtype).sum((1, 2))[:, None] + documents.to(dtype).sum((1, 2))


def _gathered(documents, mask, batch):
    """(documents, mask) of all ranks, padded to the longest."""
    if batch.group is None:
        return documents, mask
    if mask is None:
        mask = documents.new_ones(documents.shape[:2], dtype=torch.bool)
    more = batch.longest - documents.shape[1]
    documents, mask = pad(documents, (0, 0, 0, more)), pad(mask, (0, more))
    gathered = batch.gather_columns(mask.to(torch.uint8))
    return batch.gather_columns(documents), gathered.bool()

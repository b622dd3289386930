"""InfoNCE: softmax cross entropy of each anchor's positive among all candidates.

    L_i = log sum_j exp(z_ij) - z_{i, pos_i}
    z_ij = (s(a_i, c_j) - margin [j = pos_i]) / temperature + candidate_bias_j

s is the cosine, or with similarity="dot" the dot product. symmetric=True averages L_i with the loss
of the positive among the anchors, log sum_k exp(z_{k, pos_i}) - z_{i, pos_i}. directions,
own_negatives and references add terms to the sum over j (further_candidates.py). label_smoothing=e
adds e (z_{i, pos_i} - mean_j z_ij) to L_i.

Source: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding",
equation 4; symmetric: Radford et al. 2021 (CLIP), figure 3; margin: Yang et al. 2019, "Improving
Multilingual Sentence Embedding using Bi-directional Dual Encoder with Additive Margin Softmax",
equation 5; candidate_bias: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large
Corpus Item Recommendations", section 3, s - log p_j (logQ correction); directions: Li et al. 2023,
"Towards General Text Embeddings with Multi-stage Contrastive Learning" (GTE), equation 3;
references: He et al. 2020 (MoCo), Wang et al. 2020 (XBM); guide: Solatorio 2024, "GISTEmbed";
label_smoothing: Szegedy et al. 2016, as in torch.nn.CrossEntropyLoss. Also known as
MultipleNegativesRanking (scale = 1 / temperature), NT-Xent, in-batch negatives. SupCon (`sup_con`)
extends it to several positives.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Group, Reduction, Scalar, Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import extras_of
from fastsim.checks import (
    check_candidates,
    check_columns,
    check_reduction,
    check_scores,
    check_similarity,
)
from fastsim.distributed import batchwise
from fastsim.engine.prepared import note, once_per_signature
from fastsim.losses.batch_info_nce import batch_info_nce
from fastsim.losses.further_candidates import check_guide, dense_guide, further_of
from fastsim.losses.info_nce_in_one_call import info_nce_in_one_call
from fastsim.losses.info_nce_options import check_options, check_together
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Pairs,
    not_above,
    pair_mask,
    parse_bias,
    parse_exclude,
    parse_positives,
)
from fastsim.reduce import as_float, below_every_score, over_temperature, reduce


@embeddings_in_autocast("anchors", "candidates", "guide", "own_negatives", "references")
@once_per_signature
@batchwise
def info_nce(
    anchors: Tensor,
    candidates: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 0.05,
    symmetric: bool = False,
    exclude: Exclude = None,
    exclude_above: float | None = None,
    margin: float = 0.0,
    candidate_bias: Tensor | None = None,
    guide: tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    guide_strategy: Literal["absolute", "relative"] = "absolute",
    directions: Sequence[str] = ("query_to_doc",),
    own_negatives: Tensor | None = None,
    references: Tensor | None = None,
    label_smoothing: float = 0.0,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """InfoNCE with in-batch and hard negatives.

    The first choice for pairs, such as queries and documents. Use `siglip` if a row has several
    positives in the batch, `sup_con` if rows have class labels. If many negatives are false and no
    model for `guide` exists, try `exclude_above` or `debiased_contrastive`.

    With class weights (C, D) as candidates and labels (N,) as positives it is the softmax over C
    classes, and with a `margin` CosFace (Wang et al. 2018, equation 4).

    Formula and source: fastsim/losses/info_nce.py.

    Args:
        anchors: (N, D).
        candidates: (M, D), M >= N without `positives`. Candidates that are no anchor's positive are
            hard negatives; without `positives` they follow the N positives.
        positives: (N,) integers, the column of each anchor's positive; None: `arange(N)`.
        temperature: a positive number or tensor of one, which may require a gradient.
        symmetric: whether to average the cross entropy with that of the positives over the anchors.
        exclude: (row_ids (N,), column_ids (M,)), integers. A pair with equal ids is left out unless
            it is the anchor's positive (duplicates, known false negatives).
        exclude_above: a number >= 0; a candidate is left out if its score exceeds that of the
            positive by more than this (a likely false negative). None: no candidate is left out.
        margin: a number, subtracted from the score of the positive.
        candidate_bias: (M,) numbers added to the logits of all candidates, positives included; no
            gradient. If candidate j is sampled with probability q_j (in-batch negatives appear in
            proportion to their popularity), pass `-q.log()`. The gradient then estimates that of
            the softmax over the whole catalogue.
        guide: (anchors (N, E), candidates (M, E)), embeddings of the same rows by another model
            (GISTEmbed). A candidate is left out if its guide cosine with the anchor is above
            t - guide_margin, for t the guide cosine of the positive. The positive never is.
        guide_margin: a number; with guide_strategy "relative" the limit is t - |t| guide_margin.
        guide_strategy: "absolute" or "relative".
        directions: the scores in the softmax. "query_to_doc", always: anchor with candidates;
            "query_to_query": anchor with other anchors; "doc_to_query": positive with all anchors;
            "doc_to_doc": positive with other candidates. All four give the loss of GTE.
        own_negatives: (N, K, D), K hard negatives per anchor, compared only with that anchor. They
            cost N K scores; as candidates they would cost N^2 K.
        references: (R, D), further candidates without a gradient, such as a queue of earlier
            batches, which may be empty. With `group` each process uses only the references that it
            passes.
        label_smoothing: the share of the target, >= 0 and < 1, that is spread equally over all M
            candidates.
        similarity: the score, "cosine" or "dot"; "dot" is the dot product without normalisation,
            which suits a temperature near 1.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> queries, documents = torch.eye(3), torch.eye(3)
        >>> fastsim.info_nce(queries, documents, temperature=1.0)  # log(e + 2) - 1
        tensor(0.5514)
    """
    check_candidates(anchors, candidates, positives, group)
    check_reduction(reduction)
    check_similarity(similarity)
    further = further_of(anchors, directions, own_negatives, references)
    chosen = pick(
        backend,
        anchors,
        candidates,
        temperature,
        positives,
        exclude,
        candidate_bias,
        guide,
        own_negatives,
        references,
        kind="softmax",
        group=group,
        extras=extras_of(
            similarity=similarity,
            exclude_above=exclude_above,
            guide=guide,
            candidate_bias=candidate_bias,
            further=further.in_panels,
        ),
    )
    options = {
        "temperature": temperature,
        "symmetric": symmetric,
        "margin": margin,
        "exclude_above": exclude_above,
        "label_smoothing": label_smoothing,
        "guide_margin": guide_margin,
        "guide_strategy": guide_strategy,
    }
    check_options(**options)
    if further.present or label_smoothing:
        check_together(exclude, exclude_above, guide, symmetric, margin, label_smoothing, further)
    check_guide(guide, anchors, candidates)
    arguments = anchors, candidates, positives, further, guide
    more = {
        "exclude": exclude,
        "candidate_bias": candidate_bias,
        "options": options,
        "similarity": similarity,
        "reduction": reduction,
        "backend": chosen,
        "specification": info_nce_from_scores,
    }
    one_call = info_nce_in_one_call(*arguments, **more) if group is None else None
    if one_call is None:
        return batch_info_nce(*arguments, **more, group=group)
    function, tensors = one_call
    loss = function(*tensors)
    note(tensors, function, loss)
    return loss


class InfoNCE(LossModule):
    """The module of `info_nce`."""

    function = staticmethod(info_nce)

    def __init__(
        self,
        *,
        temperature: Scalar = 0.05,
        symmetric: bool = False,
        exclude_above: float | None = None,
        margin: float = 0.0,
        guide_margin: float = 0.0,
        guide_strategy: Literal["absolute", "relative"] = "absolute",
        directions: Sequence[str] = ("query_to_doc",),
        label_smoothing: float = 0.0,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def info_nce_from_scores(
    scores: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 0.05,
    symmetric: bool = False,
    exclude: Exclude = None,
    exclude_above: float | None = None,
    margin: float = 0.0,
    candidate_bias: Tensor | None = None,
    guide: tuple[Tensor, Tensor] | None = None,
    guide_margin: float = 0.0,
    guide_strategy: Literal["absolute", "relative"] = "absolute",
    more: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `info_nce` for scores (N, M), with the same other parameters.

    more: (N, R) further logits of each row (directions, own negatives, references), -inf if a pair
        is left out.
    """
    check_scores("scores", scores)
    rows, columns = scores.shape
    if positives is None:
        check_columns(scores)
    positives = parse_positives(positives, rows, columns, scores.device)
    ids = parse_exclude(exclude, rows, columns, scores.device)
    bias = parse_bias(candidate_bias, columns, scores)
    check_options(
        temperature,
        symmetric,
        margin,
        exclude_above,
        label_smoothing,
        guide_margin,
        guide_strategy,
    )
    pairs = Pairs(
        positives, *ids, guide=dense_guide(guide, guide_margin, guide_strategy, positives, scores)
    )
    check_reduction(reduction)
    scores = as_float(scores)
    kept = pair_mask(pairs, rows, columns, scores.device)
    if exclude_above is not None:
        kept = kept & not_above(scores, positives, exclude_above)
    place = pairs.positives[:, None]
    if margin:
        scores = scores.scatter_add(1, place, scores.new_full(place.shape, -margin))
    logits = over_temperature(scores, temperature)
    if bias is not None:
        logits = logits + bias
    unmasked = logits
    if pairs.row_ids is not None or exclude_above is not None or guide is not None:
        logits = logits.masked_fill(~kept, below_every_score(logits))
    all_logits = logits if more is None else torch.cat([logits, more], 1)
    # log_softmax keeps the digits of a small loss; logsumexp - positive would cancel them.
    losses = -all_logits.log_softmax(1).gather(1, place)[:, 0]
    if label_smoothing:
        positive = unmasked.gather(1, place)[:, 0]
        losses = losses + label_smoothing * (positive - unmasked.mean(1))
    if symmetric:
        backward = -logits.T.log_softmax(1).gather(0, place.T)[0]
        losses = 0.5 * (losses + backward)
    return reduce(losses, reduction)

"""InfoNCE: pick each anchor's positive among all candidates by softmax cross entropy.

    L_i = log sum_j exp(z_ij) - z_{i, pos_i}
    z_ij = (s(a_i, c_j) - margin [j = pos_i]) / temperature + candidate_bias_j

s is the cosine, or with similarity="dot" the dot product. symmetric=True: the mean of L_i and of
the same over anchors, log sum_k exp(z_{k, pos_i}) - z_{i, pos_i}. directions, own_negatives and
references add further terms to the sum over j (further_candidates.py). label_smoothing=e adds
e (z_{i, pos_i} - mean_j z_ij) to L_i.

Source: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding",
equation 4; symmetric: Radford et al. 2021 (CLIP), figure 3; margin: Yang et al. 2019, "Improving
Multilingual Sentence Embedding using Bi-directional Dual Encoder with Additive Margin Softmax",
equation 5; candidate_bias: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large
Corpus Item Recommendations", section 3, s - log p_j (logQ correction); directions: Li et al. 2023,
"Towards General Text Embeddings with Multi-stage Contrastive Learning" (GTE), equation 3;
references: He et al. 2020 (MoCo), Wang et al. 2020 (XBM); guide: Solatorio 2024, "GISTEmbed";
label_smoothing: Szegedy et al. 2016, as torch.nn.CrossEntropyLoss has it. Known as
MultipleNegativesRanking (scale = 1 / temperature), NT-Xent, in-batch negatives. SupCon (`sup_con`)
is the same with several positives.
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
from fastsim.losses.further_candidates import Further, as_directions, check_guide, dense_guide
from fastsim.losses.info_nce_options import check_options, check_together
from fastsim.losses.module import LossModule
from fastsim.losses.small_info_nce import small_info_nce
from fastsim.pairs import (
    Pairs,
    not_above,
    pair_mask,
    parse_bias,
    parse_exclude,
    parse_positives,
)
from fastsim.reduce import as_float, below_every_score, inverse, over_temperature, reduce


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

    The first choice for pairs, such as queries and documents. Take `siglip` where a row has several
    positives in the batch, `sup_con` where rows have class labels. Where many negatives are false
    and there is no model for `guide`, try `exclude_above` or `debiased_contrastive`.

    With class weights (C, D) as candidates and labels (N,) as positives it is the softmax over C
    classes, with `margin` that of CosFace (Wang et al. 2018, equation 4).

    Formula and source: fastsim/losses/info_nce.py.

    Args:
        anchors: (N, D).
        candidates: (M, D), M >= N unless `positives` says otherwise. Columns that are nobody's
            positive are hard negatives (all positives first, then the negatives).
        positives: (N,) integers, the column of each anchor's positive; `arange(N)` by default.
        temperature: a positive number or 0-d tensor, which may require a gradient.
        symmetric: the mean of anchor -> candidate and positive -> anchor cross entropy.
        exclude: (row_ids (N,), column_ids (M,)) integers; a pair with equal ids that is not the
            anchor's positive takes no part (duplicates, known false negatives).
        exclude_above: a number, at least 0; a candidate whose score exceeds the positive's by more
            than this takes no part (a likely false negative). None: all take part.
        margin: a number, taken from the positive's score.
        candidate_bias: (M,) numbers added to the candidates' logits, positives among them, without
            a gradient. Where candidate j is drawn with probability q_j (in-batch negatives come in
            proportion to their popularity), give `-q.log()`. The gradient is then an estimate, from
            the batch, of that of the softmax over the whole catalogue.
        guide: (anchors (N, E), candidates (M, E)), embeddings of the same rows by another model
            (GISTEmbed). A candidate takes no part if its guide cosine with the anchor is above
            t - guide_margin, where t is that of the positive. The positive always takes part.
        guide_margin: a number; with guide_strategy "relative" the limit is t - |t| guide_margin.
        guide_strategy: "absolute" or "relative".
        directions: which scores compete with the positive's: always "query_to_doc", those of the
            anchor with the candidates; also "query_to_query", of the anchor with other anchors;
            "doc_to_query", of the positive with all anchors; "doc_to_doc", of the positive with
            other candidates. All four give the loss of GTE.
        own_negatives: (N, K, D), K hard negatives per anchor, which are compared with that anchor
            alone. They cost N K scores; as candidates they would cost N^2 K.
        references: (R, D), candidates without a gradient, such as a queue of earlier batches;
            with `group` too, a process uses its own alone.
        label_smoothing: the share, at least 0 and below 1, of the target that all M candidates
            get in equal parts.
        similarity: what a score is: "cosine", or "dot" for the dot product without normalisation,
            which suits a temperature near 1.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> queries, documents = torch.eye(3), torch.eye(3)
        >>> fastsim.info_nce(queries, documents, temperature=1.0)  # log(e + 2) - 1
        tensor(0.5514)
    """
    check_candidates(anchors, candidates, positives, group)
    check_reduction(reduction)
    check_similarity(similarity)
    further = Further(as_directions(directions), own_negatives, references)
    further.check(anchors)
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
    if further.given or label_smoothing:
        check_together(exclude, exclude_above, guide, symmetric, margin, label_smoothing, further)
    check_guide(guide, anchors, candidates)
    asked = positives, exclude, exclude_above, group
    if not (isinstance(temperature, Tensor) or any(value is not None for value in asked)):
        found = small_info_nce(
            anchors,
            candidates,
            further,
            guide,
            candidate_bias,
            scale=inverse(temperature, anchors),
            label_smoothing=label_smoothing,
            similarity=similarity,
            reduction=reduction,
            backend=chosen,
            options=options,
            formula=info_nce_from_scores,
        )
        if found is not None:
            small, tensors = found
            loss = small(*tensors)
            note(tensors, small, loss)
            return loss
    return batch_info_nce(
        anchors,
        candidates,
        positives,
        further,
        guide,
        exclude=exclude,
        candidate_bias=candidate_bias,
        options=options,
        similarity=similarity,
        reduction=reduction,
        group=group,
        backend=chosen,
        specification=info_nce_from_scores,
    )


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
    """The specification of `info_nce`: scores (N, M), the other parameters as there.

    more: (N, R) further logits of each row (directions, own negatives, references), -inf for
        what takes no part.
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
    part = pair_mask(pairs, rows, columns, scores.device)
    if exclude_above is not None:
        part = part & not_above(scores, positives, exclude_above)
    place = pairs.positives[:, None]
    if margin:
        scores = scores.scatter_add(1, place, scores.new_full(place.shape, -margin))
    logits = over_temperature(scores, temperature)
    if bias is not None:
        logits = logits + bias
    every = logits
    if pairs.row_ids is not None or exclude_above is not None or guide is not None:
        logits = logits.masked_fill(~part, below_every_score(logits))
    all_logits = logits if more is None else torch.cat([logits, more], 1)
    # log_softmax keeps the digits of a small loss, which logsumexp - positive would cancel.
    losses = -all_logits.log_softmax(1).gather(1, place)[:, 0]
    if label_smoothing:
        positive = every.gather(1, place)[:, 0]
        losses = losses + label_smoothing * (positive - every.mean(1))
    if symmetric:
        backward = -logits.T.log_softmax(1).gather(0, place.T)[0]
        losses = 0.5 * (losses + backward)
    return reduce(losses, reduction)

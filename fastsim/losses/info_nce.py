"""InfoNCE: pick each anchor's positive among all candidates by softmax cross entropy.

    L_i = log sum_j exp(z_ij) - z_{i, pos_i}
    z_ij = (s(a_i, c_j) - margin [j = pos_i]) / temperature + candidate_bias_j

s is the cosine, or with similarity="dot" the dot product. symmetric=True: the mean of L_i and of
the same over anchors, log sum_k exp(z_{k, pos_i}) - z_{i, pos_i}.

Source: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding",
equation 4; symmetric: Radford et al. 2021 (CLIP), figure 3; margin: Yang et al. 2019, "Improving
Multilingual Sentence Embedding using Bi-directional Dual Encoder with Additive Margin Softmax",
equation 5; candidate_bias: Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large
Corpus Item Recommendations", section 3, s - log p_j (logQ correction). Known as
MultipleNegativesRanking (scale = 1 / temperature), NT-Xent, in-batch negatives. SupCon (`sup_con`)
is the same with several positives.
"""

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Group, Reduction, Scalar, Similarity
from fastsim.backends import pick
from fastsim.checks import (
    check_candidates,
    check_choice,
    check_columns,
    check_number,
    check_reduction,
    check_scores,
    check_similarity,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Pairs,
    global_exclude,
    global_positives,
    not_above,
    pair_mask,
    parse_bias,
    parse_exclude,
    parse_positives,
)
from fastsim.reduce import as_float, below_every_score, inverse, reduce
from fastsim.scores import dense_scores
from fastsim.tile import Tile


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
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """InfoNCE with in-batch and hard negatives.

    The first choice for pairs, such as queries and documents. Take `siglip` where a row has several
    positives in the batch, `sup_con` where rows have class labels.

    Args:
        anchors: (N, D).
        candidates: (M, D), M >= N unless `positives` says otherwise. Columns that are nobody's
            positive are hard negatives (all positives first, then the negatives).
        positives: (N,) integers, the column of each anchor's positive; `arange(N)` by default.
        temperature: a positive number or 0-d tensor, with a gradient if it wants one.
        symmetric: the mean of anchor -> candidate and positive -> anchor cross entropy.
        exclude: (row_ids (N,), column_ids (M,)) integers; a pair with equal ids that is not the
            anchor's positive takes no part (duplicates, known false negatives).
        exclude_above: a candidate whose score is more than this above the positive's takes no part
            (a likely false negative); None: all do.
        margin: a number, taken from the positive's score.
        candidate_bias: (M,) numbers added to the candidates' logits, positives among them, without
            a gradient. Where candidate j is drawn with probability q_j, as in-batch negatives are
            drawn by how popular they are, give `-q.log()`: minus the log. The gradient is then that
            of the softmax over the whole catalogue, estimated from the batch.
        similarity: what a score is: "cosine", or "dot" for the product of the rows as they are,
            with a temperature near 1.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: its name; None chooses.

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
    chosen = pick(
        backend,
        anchors,
        candidates,
        temperature,
        kind="softmax",
        group=group,
        column_bias=candidate_bias is not None,
    )
    options = {"temperature": temperature, "symmetric": symmetric, "margin": margin}
    options["exclude_above"] = exclude_above
    _check_options(**options)
    own = anchors.shape[0], candidates.shape[0], anchors.device
    positives, ids = parse_positives(positives, *own), parse_exclude(exclude, *own)
    bias = parse_bias(candidate_bias, candidates.shape[0], anchors)
    batch = join(
        group,
        "info_nce",
        anchors,
        candidates,
        **options,
        exclude=exclude,
        candidate_bias=candidate_bias,
        similarity=similarity,
        reduction=reduction,
        backend=chosen.name,
    )
    positives = global_positives(positives, batch)
    row_ids, column_ids = global_exclude(ids, batch)
    bias = batch.gather_columns(bias)
    if chosen.name == "eager":
        losses = info_nce_from_scores(
            dense_scores(*batch.gather_both(anchors, candidates), chosen, similarity),
            batch.gather_rows(positives),
            **options,
            exclude=None if row_ids is None else (batch.gather_rows(row_ids), column_ids),
            candidate_bias=bias,
            reduction="none",
        )
        return batch.reduce(losses, reduction)
    pairs = Pairs(positives, row_ids, column_ids, exclude_above=exclude_above, column_bias=bias)

    def formula(scores, scale, _):
        exclude = None if row_ids is None else (row_ids, column_ids)
        given = options | {"temperature": 1 / scale, "exclude": exclude, "reduction": "none"}
        return info_nce_from_scores(scores, positives, **given, candidate_bias=bias)

    cosine = similarity == "cosine"
    return tile_loss(
        Tile("softmax", pairs, margin=float(margin), symmetric=symmetric, cosine=cosine),
        anchors,
        candidates,
        scale=inverse(temperature, anchors),
        weights=batch.row_weights(reduction, anchors),
        batch=batch,
        formula=formula,
        backend=chosen,
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
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `info_nce`: scores (N, M), the other parameters as there."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    if positives is None:
        check_columns(scores)
    positives = parse_positives(positives, rows, columns, scores.device)
    ids = parse_exclude(exclude, rows, columns, scores.device)
    bias = parse_bias(candidate_bias, columns, scores)
    pairs = Pairs(positives, *ids)
    _check_options(temperature, symmetric, margin, exclude_above)
    check_reduction(reduction)
    scores = as_float(scores)
    part = pair_mask(pairs, rows, columns, scores.device)
    if exclude_above is not None:
        part = part & not_above(scores, positives, exclude_above)
    place = pairs.positives[:, None]
    if margin:
        scores = scores.scatter_add(1, place, scores.new_full(place.shape, -margin))
    logits = scores / temperature
    if bias is not None:
        logits = logits + bias
    positive = logits.gather(1, place)[:, 0]
    if pairs.row_ids is not None or exclude_above is not None:
        logits = logits.masked_fill(~part, below_every_score(logits))
    losses = torch.logsumexp(logits, 1) - positive
    if symmetric:
        backward = torch.logsumexp(logits, 0)[pairs.positives] - positive
        losses = 0.5 * (losses + backward)
    return reduce(losses, reduction)


def _check_options(temperature, symmetric, margin, exclude_above):
    check_number("temperature", temperature, positive=True)
    check_choice("symmetric", symmetric, (False, True))
    check_number("margin", margin, tensor=False)
    if exclude_above is not None:
        check_number("exclude_above", exclude_above, tensor=False)
        if exclude_above < 0:
            raise ValueError(f"exclude_above: wanted at least 0, or None, got {exclude_above}")

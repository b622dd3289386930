"""Decoupled contrastive learning: InfoNCE without the positive in the denominator.

    L_i = log sum_{j != pos_i} exp(z_ij) - z_{i, pos_i},   z = s / temperature + candidate_bias_j

s is the cosine, or with similarity="dot" the dot product; candidate_bias as in `info_nce`.

Source: Yeh et al. 2022, "Decoupled Contrastive Learning", equation 6 (L_DC). The gradient of
InfoNCE is the gradient of this loss times 1 - p, with p the probability of the positive. In a small
batch p is often close to 1, so little gradient remains. Without this factor small batches train
nearly as well as large ones. The loss has no lower bound.
"""

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction, Scalar, Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import extras_of
from fastsim.checks import (
    check_candidates,
    check_columns,
    check_number,
    check_reduction,
    check_scores,
    check_similarity,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.later_calls import given_temperature
from fastsim.engine.prepared import once_per_signature
from fastsim.losses.module import LossModule
from fastsim.pairs import Pairs, global_positives, parse_bias, parse_positives
from fastsim.reduce import as_float, inverse, reduce
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss


@embeddings_in_autocast("anchors", "candidates")
@once_per_signature
@batchwise
def decoupled_contrastive(
    anchors: Tensor,
    candidates: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 0.1,
    candidate_bias: Tensor | None = None,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """InfoNCE without the positive in the denominator, for small batches.

    For large batches, or for a loss that is bounded below, use `info_nce`.

    Formula and source: fastsim/losses/decoupled_contrastive.py.

    Args:
        anchors: (N, D).
        candidates: (M, D); all but the anchor's positive are its negatives.
        positives: (N,) integers, the column of each anchor's positive; None: `arange(N)`.
        temperature: a positive number or tensor of one, which may require a gradient.
        candidate_bias: (M,) numbers added to the logits of the candidates; -log q_j for candidates
            sampled with probabilities q_j (see `info_nce`).
        similarity: the score, "cosine" or "dot" for the dot product without normalisation.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". An anchor without a negative has loss 0. One whose
        negatives all have dot products of -inf has loss -inf, the logarithm of 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> queries, documents = torch.eye(3), torch.eye(3)
        >>> fastsim.decoupled_contrastive(queries, documents, temperature=1.0)  # log 2 - 1
        tensor(-0.3069)
    """
    check_candidates(anchors, candidates, positives, group)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    check_similarity(similarity)
    chosen = pick(
        backend,
        anchors,
        candidates,
        temperature,
        positives,
        candidate_bias,
        kind="decoupled",
        group=group,
        extras=extras_of(similarity=similarity, candidate_bias=candidate_bias),
    )
    bias = parse_bias(candidate_bias, candidates.shape[0], anchors)
    batch = join(
        group,
        "decoupled_contrastive",
        anchors,
        candidates,
        temperature=temperature,
        candidate_bias=candidate_bias,
        similarity=similarity,
        reduction=reduction,
        backend=chosen.name,
    )
    own = parse_positives(positives, anchors.shape[0], candidates.shape[0], anchors.device)
    own, bias = global_positives(own, batch), batch.gather_columns(bias)
    if chosen.name == "eager":
        scores = dense_scores(anchors, batch.gather_columns(candidates), chosen, similarity)
        return batch.reduce(_losses(scores, own, temperature, bias), reduction)

    def formula(scores, scale, _):
        return _losses(scores, own, 1 / scale, bias)

    # Without negatives the loss is 0, which a softmax over the positive alone is exactly.
    kind = "decoupled" if batch.columns > 1 else "softmax"
    return tile_loss(
        TileLoss(kind, Pairs(own, column_bias=bias), cosine=similarity == "cosine"),
        anchors,
        candidates,
        scale=inverse(temperature, anchors),
        given=given_temperature(temperature),
        weights=batch.row_weights(reduction, anchors),
        batch=batch,
        formula=formula,
        backend=chosen,
    )


class DecoupledContrastive(LossModule):
    """The module of `decoupled_contrastive`."""

    function = staticmethod(decoupled_contrastive)

    def __init__(
        self,
        *,
        temperature: Scalar = 0.1,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def decoupled_contrastive_from_scores(
    scores: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 0.1,
    candidate_bias: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `decoupled_contrastive` for scores (N, M); other parameters as there."""
    check_scores("scores", scores)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    rows, columns = scores.shape
    if positives is None:
        check_columns(scores)
    positives = parse_positives(positives, rows, columns, scores.device)
    bias = parse_bias(candidate_bias, columns, scores)
    return reduce(_losses(as_float(scores), positives, temperature, bias), reduction)


def _losses(scores, positives, temperature, bias):
    logits = scores / temperature
    if bias is not None:
        logits = logits + bias
    place = positives[:, None]
    positive = logits.gather(1, place)[:, 0]
    if scores.shape[1] == 1:
        return 0 * positive
    return torch.logsumexp(logits.scatter(1, place, -torch.inf), 1) - positive

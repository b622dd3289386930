"""Debiased contrastive learning: InfoNCE that corrects for positives among its negatives.

    L_i = -log(e^z_p / (e^z_p + N_i)),   z = cos / temperature,   p = pos_i
    N_i = max((R_i - tau_plus K_i e^z_p) / (1 - tau_plus), K_i e^(-1 / temperature))
    R_i = K_i sum_n e^((1 + beta) z_in) / sum_n e^(beta z_in),   n over the K_i negatives

Source: Chuang et al. 2020, "Debiased Contrastive Learning", equations 7 and 8 with one positive
sample (beta = 0, so that R_i = sum_n e^z_in); Robinson et al. 2021, "Contrastive Learning with Hard
Negative Samples", equation 4 with their sample weights e^(beta z) (beta > 0). With tau_plus = 0 and
beta = 0 the loss is `info_nce`.
"""

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Group, Reduction, Scalar
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.checks import (
    FLOATING,
    check_candidates,
    check_columns,
    check_device,
    check_number,
    check_range,
    check_reduction,
    check_scores,
    check_tensor,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.later_calls import given_temperature
from fastsim.engine.prepared import once_per_signature
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Pairs,
    global_exclude,
    global_positives,
    negative_counts,
    pair_mask,
    parse_exclude,
    parse_positives,
)
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float, inverse, reduce, softplus
from fastsim.scores import dense_cosines
from fastsim.tile_loss import TileLoss


@embeddings_in_autocast("anchors", "candidates")
@once_per_signature
@batchwise
def debiased_contrastive(
    anchors: Tensor,
    candidates: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 0.5,
    tau_plus: float | Tensor = 0.1,
    beta: float = 0.0,
    exclude: Exclude = None,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """InfoNCE with false negatives discounted (tau_plus) and hard negatives up-weighted (beta).

    For pairs without labels, if many of the other candidates belong to the anchor's class. If the
    false negatives are known use `info_nce` with `exclude`; if a guide model can find them use
    `info_nce` with `guide`.

    Formula and source: fastsim/losses/debiased_contrastive.py.

    Args:
        anchors: (N, D).
        candidates: (M, D); all but the anchor's positive are its negatives.
        positives: (N,) integers, the column of each anchor's positive; None: `arange(N)`.
        temperature: a positive number or tensor of one, which may require a gradient.
        tau_plus: the probability, >= 0 and < 1, that a negative is in fact a positive: a number, or
            (N,) for the rows. For classes of equal size it is 1 / the number of classes.
        beta: a number >= 0; a negative has the weight e^(beta cos / temperature). 0: equal weights.
        exclude: (row_ids (N,), column_ids (M,)), integers. A pair with equal ids is left out unless
            it is the anchor's positive.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". An anchor without a negative has loss 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> queries, documents = torch.eye(3), torch.eye(3)
        >>> fastsim.debiased_contrastive(queries, documents, temperature=1.0)
        tensor(0.4671)
    """
    check_candidates(anchors, candidates, positives, group)
    check_reduction(reduction)
    tensors = anchors, candidates, positives, temperature, tau_plus, exclude
    chosen = pick(backend, *tensors, kind="debiased", group=group)
    _check_options(temperature, tau_plus, beta, anchors)
    own = anchors.shape[0], candidates.shape[0], anchors.device
    positives, ids = parse_positives(positives, *own), parse_exclude(exclude, *own)
    batch = join(
        group,
        "debiased_contrastive",
        anchors,
        candidates,
        temperature=temperature,
        tau_plus=tau_plus,
        beta=beta,
        exclude=exclude,
        reduction=reduction,
        backend=chosen.name,
    )
    positives = global_positives(positives, batch)
    row_ids, column_ids = global_exclude(ids, batch)
    pairs = Pairs(positives, row_ids, column_ids)
    if chosen.name == "eager":
        scores = dense_cosines(anchors, batch.gather_columns(candidates), chosen)
        return batch.reduce(_losses(scores, pairs, temperature, tau_plus, beta), reduction)
    columns = torch.arange(batch.columns, device=anchors.device)
    counts = negative_counts(pairs, batch.columns, chosen).to(compute_dtype(anchors))
    prior = torch.stack([torch.zeros_like(counts) + tau_plus, counts], 1).to(counts.dtype)

    def formula(scores, scale, _):
        return _losses(scores, pairs, 1 / scale, tau_plus, beta)

    by_groups = Pairs(positives, row_ids, column_ids, positives, columns, negative_target=0.0)
    return tile_loss(
        TileLoss("debiased", by_groups, hardness=float(beta), prior=prior),
        anchors,
        candidates,
        scale=inverse(temperature, anchors),
        given=given_temperature(temperature),
        weights=batch.row_weights(reduction, anchors),
        batch=batch,
        formula=formula,
        backend=chosen,
    )


class DebiasedContrastive(LossModule):
    """The module of `debiased_contrastive`."""

    function = staticmethod(debiased_contrastive)

    def __init__(
        self,
        *,
        temperature: Scalar = 0.5,
        tau_plus: float | Tensor = 0.1,
        beta: float = 0.0,
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def debiased_contrastive_from_scores(
    scores: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: Scalar = 0.5,
    tau_plus: float | Tensor = 0.1,
    beta: float = 0.0,
    exclude: Exclude = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `debiased_contrastive` for cosines (N, M); other parameters as there."""
    check_scores("scores", scores)
    _check_options(temperature, tau_plus, beta, scores)
    check_reduction(reduction)
    rows, columns = scores.shape
    if positives is None:
        check_columns(scores)
    positives = parse_positives(positives, rows, columns, scores.device)
    pairs = Pairs(positives, *parse_exclude(exclude, rows, columns, scores.device))
    return reduce(_losses(as_float(scores), pairs, temperature, tau_plus, beta), reduction)


def _losses(scores, pairs, temperature, tau_plus, beta):
    logits, place = scores / temperature, pairs.positives[:, None]
    negative = pair_mask(pairs, *scores.shape, scores.device).scatter(1, place, False)
    count = negative.sum(1).to(scores.dtype)
    with_negative = count > 0
    # A row without a negative keeps all columns, for finite sums; its loss is set to 0 below.
    kept = negative | ~with_negative[:, None]
    log_count = count.clamp(min=1).log()
    sums = torch.logsumexp(((1 + beta) * logits).masked_fill(~kept, -torch.inf), 1)
    if beta:
        weights = torch.logsumexp((beta * logits).masked_fill(~kept, -torch.inf), 1)
        sums = sums + log_count - weights
    positive = logits.gather(1, place)[:, 0]
    # In logarithms: N_i / e^z_p is (R_i / e^z_p - tau_plus K_i) / (1 - tau_plus), or its lower
    # bound.
    tau_plus = torch.as_tensor(tau_plus, dtype=scores.dtype, device=scores.device)
    expected = (tau_plus * count.clamp(min=1)).log()
    least = log_count - 1 / temperature - positive
    ratio = sums - positive
    low = ratio < torch.logaddexp(least + torch.log1p(-tau_plus), expected)
    ratio = torch.where(low, 0.0, ratio)
    share = torch.where(low, 0.0, (expected - ratio).exp())
    log_rate = ratio + torch.log1p(-share) - torch.log1p(-tau_plus)
    # Not 0 but 0 * positive: a NaN reaches the loss of a row without a negative too.
    return torch.where(with_negative, softplus(torch.where(low, least, log_rate)), 0 * positive)


def _check_options(temperature, tau_plus, beta, x):
    check_number("temperature", temperature, positive=True)
    check_number("beta", beta, tensor=False)
    if beta < 0:
        raise ValueError(f"beta: wanted at least 0, got {beta}")
    if not isinstance(tau_plus, Tensor):
        check_number("tau_plus", tau_plus, tensor=False)
        if not 0 <= tau_plus < 1:
            raise ValueError(f"tau_plus: wanted at least 0 and below 1, got {tau_plus}")
        return
    check_tensor("tau_plus", tau_plus, ndim=1, dtypes=FLOATING, what="probabilities", empty=True)
    if tau_plus.shape[0] != x.shape[0]:
        raise ValueError(f"tau_plus: wanted {x.shape[0]} numbers, got {tau_plus.shape[0]}")
    check_device("tau_plus", tau_plus, "the embeddings", x)
    check_range("tau_plus", tau_plus, 1)
    if tau_plus.requires_grad and torch.is_grad_enabled():
        raise ValueError("tau_plus: wanted numbers without a gradient, got requires_grad=True")

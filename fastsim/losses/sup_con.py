"""SupCon: InfoNCE with every other member of the group as a positive.

    L_i = log sum_{j != i} exp(z_ij) - mean_{p in group(i), p != i} z_ip,   z = cos / temperature

Source: Khosla et al. 2020, "Supervised Contrastive Learning", equation 2 (L_out). With groups of
two it is NT-Xent; `info_nce` is the case of one named positive.
"""

import torch

from fastsim.backends import pick
from fastsim.checks import (
    check_embeddings,
    check_integers,
    check_number,
    check_reduction,
    check_scores,
)
from fastsim.distributed import join
from fastsim.engine import tile_loss
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float, off_range, reduce
from fastsim.scores import compute_dtype, dense_cosines
from fastsim.targets import Pairs, dense_targets, taking_part
from fastsim.tiles import Tile


def sup_con(embeddings, groups, *, temperature=0.1, reduction="mean", group=None, backend=None):
    """Supervised contrastive loss of embeddings (N, D) with integer groups (N,).

    A row alone in its group has no positive: its loss is 0 and it does not count in the mean, so
    a batch without any pair gives 0 with zero gradient. temperature: a positive number or 0-d
    tensor, with a gradient if it wants one. group: a process group whose ranks each give their
    part of the batch, or `Ring(group)`; see `fastsim.distributed`.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit, RuntimeError for a backend that cannot serve them. Source: see the module.
    """
    check_embeddings("embeddings", embeddings)
    check_integers("groups", groups, embeddings.shape[0], embeddings.device)
    check_reduction(reduction)
    chosen = pick(backend, embeddings)
    groups = groups.to(torch.int64)
    check_number("temperature", temperature, positive=True)
    options = {"temperature": temperature}
    batch = join(
        group,
        "sup_con",
        embeddings,
        embeddings,
        **options,
        reduction=reduction,
        backend=chosen.name,
    )
    everyone = batch.gather_columns(groups)
    weights = _weights(everyone, reduction, compute_dtype(embeddings))
    if weights is not None and group is not None:
        weights = weights[batch.own_rows] * (batch.ranks if reduction == "mean" else 1)
    if chosen.name == "eager":
        scores = dense_cosines(batch.gather_rows(embeddings), None, chosen)
        losses = sup_con_from_scores(scores, everyone, **options, reduction="none")[batch.own_rows]
        return losses if weights is None else reduce(losses * weights, "sum")
    return tile_loss(
        Tile("softmax", _pairs(groups, everyone, batch.first_column), normalise=True),
        embeddings,
        None,
        scale=1 / temperature,
        weights=weights,
        batch=batch,
        backend=chosen,
    )


class SupCon(LossModule):
    """The module of `sup_con`."""

    function = staticmethod(sup_con)


def sup_con_from_scores(scores, groups, *, temperature=0.1, reduction="mean"):
    """The specification of `sup_con`: scores (N, N), the other parameters as there."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    if rows != columns:
        raise ValueError(f"scores: wanted a square matrix, got shape {tuple(scores.shape)}")
    check_integers("groups", groups, rows, scores.device)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    groups = groups.to(torch.int64)
    pairs = _pairs(groups, groups)
    logits = as_float(scores) / temperature
    part = taking_part(pairs, rows, columns, scores.device)
    positive = dense_targets(pairs, rows, columns, logits.dtype, scores.device) * part
    count = positive.sum(1)
    lse = torch.logsumexp(logits.masked_fill(~part, off_range(logits)), 1)
    mean = (logits * positive).sum(1) / count.clamp(min=1)
    losses = torch.where(count > 0, lse - mean, 0.0)
    weights = _weights(groups, reduction, logits.dtype)
    return losses if weights is None else reduce(losses * weights, "sum")


def _pairs(row_groups, column_groups, offset=0):
    return Pairs(
        row_groups=row_groups,
        column_groups=column_groups,
        otherwise=0.0,
        skip="diagonal",
        offset=offset,
    )


def _weights(groups, reduction, dtype):
    """1 / (rows with a positive) for "mean", 0 for rows without one."""
    if reduction == "none":
        return None
    order = groups.argsort()
    ordered = groups[order]
    same = ordered[1:] == ordered[:-1]
    edge = same.new_zeros(1)
    paired = torch.empty_like(order, dtype=dtype)
    paired[order] = (torch.cat([edge, same]) | torch.cat([same, edge])).to(dtype)
    return paired if reduction == "sum" else paired / paired.sum().clamp(min=1)

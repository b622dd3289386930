"""SupCon: InfoNCE with every other member of the group as a positive.

    L_i = log sum_{j != i} exp(z_ij) - mean_{p in group(i), p != i} z_ip,   z = cos / temperature

Source: Khosla et al. 2020, "Supervised Contrastive Learning", equation 2 (L_out). With groups of
two it is NT-Xent; `info_nce` is the case of one named positive.
"""

import torch

from fastsim.backends import pick
from fastsim.checks import check_number, check_reduction
from fastsim.distributed import join
from fastsim.engine.autograd import tile_loss
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float, below_every_score, inverse, reduce
from fastsim.pairs import (
    dense_targets,
    global_groups,
    groups_of_scores,
    pair_mask,
    parse_groups,
    positive_counts,
)
from fastsim.scores import dense_cosines
from fastsim.tile import Tile


def sup_con(
    embeddings,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    temperature=0.1,
    reduction="mean",
    group=None,
    backend=None,
):
    """Supervised contrastive loss of embeddings (N, D) with integer groups (N,).

    references (M, D), reference_groups (M,): what the embeddings are held against, by default
    themselves, each row left out of its own; own_first: the first N references are the
    embeddings' own, and row i leaves out reference i.
    temperature: a positive number or 0-d tensor, with a gradient if it wants one.
    A row without a positive has loss 0 and does not count in the mean, so a batch without any
    pair gives 0 with zero gradient.
    group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
    `fastsim.distributed`.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit, RuntimeError for a backend that cannot serve them. Source: see the module.
    """
    pairs = parse_groups(embeddings, groups, references, reference_groups, own_first)
    check_reduction(reduction)
    check_number("temperature", temperature, positive=True)
    chosen = pick(backend, embeddings, references, temperature, kind="softmax")
    columns = embeddings if references is None else references
    batch = join(
        group,
        "sup_con",
        embeddings,
        columns,
        references=references,
        own_first=own_first,
        temperature=temperature,
        reduction=reduction,
        backend=chosen.name,
    )
    pairs = global_groups(pairs, batch)
    count = _count(pairs) if reduction == "mean" else None
    if chosen.name == "eager":
        scores = dense_cosines(embeddings, batch.gather_columns(columns), chosen)
        return batch.reduce(_losses(scores, pairs, temperature), reduction, count)
    return tile_loss(
        Tile("softmax", pairs, normalise=True),
        embeddings,
        columns,
        scale=inverse(temperature, embeddings),
        weights=batch.row_weights(reduction, embeddings, count),
        batch=batch,
        formula=lambda scores, scale, _: _losses(scores, pairs, 1 / scale),
        backend=chosen,
    )


class SupCon(LossModule):
    """The module of `sup_con`."""

    function = staticmethod(sup_con)


def sup_con_from_scores(
    scores,
    groups,
    reference_groups=None,
    *,
    own_first=False,
    temperature=0.1,
    reduction="mean",
):
    """The specification of `sup_con`: scores (N, M), the other parameters as there."""
    pairs = groups_of_scores(scores, groups, reference_groups, own_first)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    return reduce(_losses(as_float(scores), pairs, temperature), reduction, _count(pairs))


def _losses(scores, pairs, temperature):
    rows, columns = scores.shape
    logits = scores / temperature
    part = pair_mask(pairs, rows, columns, scores.device)
    positive = dense_targets(pairs, rows, columns, logits.dtype, scores.device) * part
    count = positive.sum(1)
    lse = torch.logsumexp(logits.masked_fill(~part, below_every_score(logits)), 1)
    mean = (logits * positive).sum(1) / count.clamp(min=1)
    return torch.where(count > 0, lse - mean, 0.0)


def _count(pairs):
    """Rows with a positive: the others' losses are 0."""
    return (positive_counts(pairs) > 0).sum()

"""NT-Xent with any number of positives: each positive pair against the negatives of its row.

    N_i = log sum_{n not in group(i)} exp(z_in),   z = cos / temperature
    L_ip = log(exp(z_ip) + exp(N_i)) - z_ip = softplus(N_i - z_ip),   p in group(i), p != i

Source: Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations",
equation 1, extended to groups of any size by leaving the other positives out of the denominator,
as Feeney and Hughes 2023, "SINCERE: Supervised Information Noise-Contrastive Estimation
REvisited". `sup_con` keeps them there; with groups of two both are the same.
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


def nt_xent(
    embeddings,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    temperature=0.07,
    reduction="mean",
    group=None,
    backend=None,
):
    """Normalised temperature-scaled cross entropy of embeddings (N, D), integer groups (N,).

    references (M, D), reference_groups (M,): what the embeddings are held against, by default
    themselves, each row left out of its own; own_first: the first N references are the
    embeddings' own, and row i leaves out reference i. temperature: a positive number or 0-d
    tensor, with a gradient if it wants one. A row without a negative has loss 0.
    group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
    `fastsim.distributed`. The mean is then over the positive pairs of all ranks.

    Returns a scalar, the mean or sum over all positive pairs, or for reduction "none" the sums of
    the rows (N,). ValueError or TypeError for arguments that do not fit, RuntimeError for a
    backend that cannot serve them. Source: see the module.
    """
    pairs = parse_groups(embeddings, groups, references, reference_groups, own_first)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    chosen = pick(backend, embeddings, references, temperature, kind="multi_positive")
    columns = embeddings if references is None else references
    batch = join(
        group,
        "nt_xent",
        embeddings,
        columns,
        references=references,
        own_first=own_first,
        temperature=temperature,
        reduction=reduction,
        backend=chosen.name,
    )
    pairs = global_groups(pairs, batch)
    count = positive_counts(pairs).sum() if reduction == "mean" else None
    if chosen.name == "eager":
        scores = dense_cosines(embeddings, batch.gather_columns(columns), chosen)
        return batch.reduce(_losses(scores, pairs, temperature), reduction, count)
    return tile_loss(
        Tile("multi_positive", pairs),
        embeddings,
        columns,
        scale=inverse(temperature, embeddings),
        weights=batch.row_weights(reduction, embeddings, count),
        batch=batch,
        formula=lambda scores, scale, _: _losses(scores, pairs, 1 / scale),
        backend=chosen,
    )


class NTXent(LossModule):
    """The module of `nt_xent`."""

    function = staticmethod(nt_xent)


def nt_xent_from_scores(
    scores,
    groups,
    reference_groups=None,
    *,
    own_first=False,
    temperature=0.07,
    reduction="mean",
):
    """The specification of `nt_xent`: scores (N, M), the other parameters as there."""
    pairs = groups_of_scores(scores, groups, reference_groups, own_first)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    losses = _losses(as_float(scores), pairs, temperature)
    return reduce(losses, reduction, positive_counts(pairs).sum())


def _losses(scores, pairs, temperature):
    logits = scores / temperature
    part = pair_mask(pairs, *scores.shape, scores.device)
    own = dense_targets(pairs, *scores.shape, torch.bool, scores.device)
    negative = part & ~own
    lse = torch.logsumexp(logits.masked_fill(~negative, below_every_score(logits)), 1, keepdim=True)
    counted = part & own & negative.any(1, keepdim=True)
    terms = torch.nn.functional.softplus(lse - logits)
    return torch.where(counted, terms, 0.0).sum(1)

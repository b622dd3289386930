"""Multi-similarity: soft hinges on a row's positives and on its negatives, each weighed by all.

    L_i = (1/alpha) log(1 + sum_{p in group(i), p != i} exp(-alpha (cos_ip - base)))
        + (1/beta)  log(1 + sum_{n not in group(i)}     exp(beta (cos_in - base)))

Source: Wang et al. 2019, "Multi-Similarity Loss with General Pair Weighting for Deep Metric
Learning", equation 15, without its mining. A positive's weight grows with its distance to the
others, a negative's with its nearness; `nt_xent` weighs negatives likewise, positives one by one.
"""

import torch

from fastsim.backends import pick
from fastsim.checks import check_number, check_reduction
from fastsim.distributed import join
from fastsim.engine.autograd import tile_loss
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float, reduce
from fastsim.pairs import (
    dense_targets,
    global_groups,
    groups_of_scores,
    pair_mask,
    parse_groups,
)
from fastsim.scores import dense_cosines
from fastsim.tile import Tile


def multi_similarity(
    embeddings,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    alpha=2.0,
    beta=50.0,
    base=0.5,
    reduction="mean",
    group=None,
    backend=None,
):
    """Multi-similarity loss of embeddings (N, D) with integer groups (N,).

    references (M, D), reference_groups (M,): what the embeddings are held against, by default
    themselves, each row left out of its own; own_first: the first N references are the
    embeddings' own, and row i leaves out reference i.
    alpha, beta: positive numbers, the steepness for positives and for negatives. base: the cosine
    at which a pair begins to count. A row without a positive or a negative has no such term.
    group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
    `fastsim.distributed`.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit, RuntimeError for a backend that cannot serve them. Source: see the module.
    """
    pairs = parse_groups(embeddings, groups, references, reference_groups, own_first)
    _check_options(alpha, beta, base)
    check_reduction(reduction)
    chosen = pick(backend, embeddings, references, kind="multi_similarity")
    columns = embeddings if references is None else references
    batch = join(
        group,
        "multi_similarity",
        embeddings,
        columns,
        references=references,
        own_first=own_first,
        alpha=alpha,
        beta=beta,
        base=base,
        reduction=reduction,
        backend=chosen.name,
    )
    pairs = global_groups(pairs, batch)
    if chosen.name == "eager":
        scores = dense_cosines(embeddings, batch.gather_columns(columns), chosen)
        return batch.reduce(_losses(scores, pairs, alpha, beta, base), reduction)
    options = {"positive_scale": float(alpha), "base": float(base)}
    return tile_loss(
        Tile("multi_similarity", pairs, **options),
        embeddings,
        columns,
        scale=float(beta),
        weights=batch.row_weights(reduction, embeddings),
        batch=batch,
        formula=lambda scores, *_: _losses(scores, pairs, alpha, beta, base),
        backend=chosen,
    )


class MultiSimilarity(LossModule):
    """The module of `multi_similarity`."""

    function = staticmethod(multi_similarity)


def multi_similarity_from_scores(
    scores,
    groups,
    reference_groups=None,
    *,
    own_first=False,
    alpha=2.0,
    beta=50.0,
    base=0.5,
    reduction="mean",
):
    """The specification of `multi_similarity`: scores (N, M), the other parameters as there."""
    pairs = groups_of_scores(scores, groups, reference_groups, own_first)
    _check_options(alpha, beta, base)
    check_reduction(reduction)
    return reduce(_losses(as_float(scores), pairs, alpha, beta, base), reduction)


def _losses(scores, pairs, alpha, beta, base):
    part = pair_mask(pairs, *scores.shape, scores.device)
    own = dense_targets(pairs, *scores.shape, torch.bool, scores.device)
    positive = _soft_hinge(-alpha * (scores - base), part & own) / alpha
    negative = _soft_hinge(beta * (scores - base), part & ~own) / beta
    return positive + negative


def _soft_hinge(logits, counted):
    """log(1 + sum of exponentials of the counted logits) by row."""
    logits = logits.masked_fill(~counted, -torch.inf)
    return torch.logsumexp(torch.cat([logits, torch.zeros_like(logits[:, :1])], 1), 1)


def _check_options(alpha, beta, base):
    for name, value in (("alpha", alpha), ("beta", beta), ("base", base)):
        check_number(name, value, positive=name != "base", tensor=False)

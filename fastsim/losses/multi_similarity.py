"""Multi-similarity: a soft hinge on a row's positives and one on its negatives.

    L_i = (1/alpha) log(1 + sum_{p in group(i), p != i} exp(-alpha (s_ip - base)))
        + (1/beta)  log(1 + sum_{n not in group(i)}     exp(beta (s_in - base)))

s is the cosine, or with similarity="dot" the dot product.

Source: Wang et al. 2019, "Multi-Similarity Loss with General Pair Weighting for Deep Metric
Learning", equation 15, without its mining. The weight of a positive grows with its distance, that
of a negative with its nearness, relative to the others; `nt_xent` weights negatives in the same
way, but each positive alone.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction, Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.checks import check_number
from fastsim.distributed import batchwise
from fastsim.losses.grouped import grouped_from_scores, grouped_loss
from fastsim.losses.module import LossModule
from fastsim.pairs import dense_targets, pair_mask


@embeddings_in_autocast("embeddings", "references")
@batchwise
def multi_similarity(
    embeddings: Tensor,
    groups: Tensor,
    references: Tensor | None = None,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Multi-similarity loss: a soft hinge on a row's positives and one on its negatives.

    For rows with a class or group id, if hard pairs should count most. `circle` weights each pair
    by its distance from its optimum; `sup_con` is a softmax without hinges.

    Formula and source: fastsim/losses/multi_similarity.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        references: (M, D), the rows that embeddings are compared with; None: the embeddings
            themselves, without the pair of a row with itself.
        reference_groups: (M,) integers, the groups of the references.
        own_first: whether the first N references are the embeddings themselves; the pair of row i
            and reference i is then left out.
        alpha, beta: positive numbers, the steepness for positives (alpha) and negatives (beta).
        base: a number, the score at which a pair begins to count.
        similarity: the score, "cosine" or "dot" for the dot product without normalisation.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". The term of positives is 0 for a row without a
        positive, and likewise for negatives.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> fastsim.multi_similarity(embeddings, torch.tensor([0, 0, 1]), alpha=1.0, beta=1.0)
        tensor(0.8969)
    """
    options = {"alpha": alpha, "beta": beta, "base": base}
    _check_options(**options)
    return grouped_loss(
        "multi_similarity",
        embeddings,
        groups,
        references,
        reference_groups,
        own_first=own_first,
        kind="multi_similarity",
        scale=float(beta),
        positive_scale=float(alpha),
        base=float(base),
        formula=partial(_losses, **options),
        options=options,
        similarity=similarity,
        reduction=reduction,
        group=group,
        backend=backend,
    )


class MultiSimilarity(LossModule):
    """The module of `multi_similarity`."""

    function = staticmethod(multi_similarity)

    def __init__(
        self,
        *,
        own_first: bool = False,
        alpha: float = 2.0,
        beta: float = 50.0,
        base: float = 0.5,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def multi_similarity_from_scores(
    scores: Tensor,
    groups: Tensor,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `multi_similarity` for scores (N, M), with the same other parameters."""
    options = {"alpha": alpha, "beta": beta, "base": base}
    _check_options(**options)
    return grouped_from_scores(
        scores,
        groups,
        reference_groups,
        own_first=own_first,
        formula=partial(_losses, **options),
        reduction=reduction,
    )


def _losses(scores, pairs, alpha, beta, base):
    kept = pair_mask(pairs, *scores.shape, scores.device)
    same = dense_targets(pairs, *scores.shape, torch.bool, scores.device)
    positive = _soft_hinge(-alpha * (scores - base), kept & same) / alpha
    negative = _soft_hinge(beta * (scores - base), kept & ~same) / beta
    return positive + negative


def _soft_hinge(logits, counted):
    """(N,) log(1 + sum of the exponentials of the row's counted logits)."""
    logits = logits.masked_fill(~counted, -torch.inf)
    return torch.logsumexp(torch.cat([logits, torch.zeros_like(logits[:, :1])], 1), 1)


def _check_options(alpha, beta, base):
    for name, value in (("alpha", alpha), ("beta", beta), ("base", base)):
        check_number(name, value, positive=name != "base", tensor=False)

"""Circle loss: positives and negatives, each weighted by its distance from the optimum.

    L_i = log(1 + sum_{p in group(i), p != i} exp(gamma a_ip (1 - margin - s_ip))
                  * sum_{n not in group(i)} exp(gamma a_in (s_in - margin)))
    a_ip = relu(1 + margin - s_ip),   a_in = relu(s_in + margin),   s = cos

Source: Sun et al. 2020, "Circle Loss: A Unified Perspective of Pair Similarity Optimization",
equation 6 (equation 4 with margins), with the weights of equation 5. The weights a are held
constant in the gradient, as in the paper. With weights of 1 the loss is a soft hinge on the hardest
pair of a positive and a negative, where `multi_similarity` has one on the positives and one on the
negatives.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction
from fastsim.autocast import embeddings_in_autocast
from fastsim.checks import check_number
from fastsim.distributed import batchwise
from fastsim.losses.grouped import grouped_from_scores, grouped_loss
from fastsim.losses.module import LossModule
from fastsim.pairs import dense_targets, pair_mask
from fastsim.reduce import below_every_score, softplus


@embeddings_in_autocast("embeddings", "references")
@batchwise
def circle(
    embeddings: Tensor,
    groups: Tensor,
    references: Tensor | None = None,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    gamma: float = 80.0,
    margin: float = 0.4,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Circle loss: positives and negatives, each weighted by its distance from the optimum.

    For rows with a class or group id, where the pairs that are far off should count most.
    `multi_similarity` has a steepness of its own for positives and for negatives, `sup_con` is a
    softmax without a margin.

    Formula and source: fastsim/losses/circle.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; equal ones are positives of each other.
        references: (M, D), the rows that embeddings are compared with; by default the embeddings
            themselves, without the pairs of a row with itself.
        reference_groups: (M,) integers, together with references.
        own_first: whether the first N references are the embeddings themselves; the pair of row i
            and reference i is then left out.
        gamma: a positive number, the steepness.
        margin: a number; positives are drawn to a cosine above 1 - margin, negatives pushed to one
            below margin.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". A row without a positive or a negative has loss 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> fastsim.circle(embeddings, torch.tensor([0, 0, 1]), gamma=1.0)
        tensor(0.3639)
    """
    options = {"gamma": gamma, "margin": margin}
    _check_options(**options)
    return grouped_loss(
        "circle",
        embeddings,
        groups,
        references,
        reference_groups,
        own_first=own_first,
        kind="circle",
        scale=float(gamma),
        margin=float(margin),
        formula=partial(_losses, **options),
        options=options,
        reduction=reduction,
        group=group,
        backend=backend,
    )


class Circle(LossModule):
    """The module of `circle`."""

    function = staticmethod(circle)

    def __init__(
        self,
        *,
        own_first: bool = False,
        gamma: float = 80.0,
        margin: float = 0.4,
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def circle_from_scores(
    scores: Tensor,
    groups: Tensor,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    gamma: float = 80.0,
    margin: float = 0.4,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `circle`: scores (N, M), the other parameters as there."""
    options = {"gamma": gamma, "margin": margin}
    _check_options(**options)
    return grouped_from_scores(
        scores,
        groups,
        reference_groups,
        own_first=own_first,
        formula=partial(_losses, **options),
        reduction=reduction,
    )


def _losses(scores, pairs, gamma, margin):
    part = pair_mask(pairs, *scores.shape, scores.device)
    own = dense_targets(pairs, *scores.shape, torch.bool, scores.device)
    held = scores.detach()
    falling = torch.relu(1 + margin - held) * (1 - margin - scores)
    rising = torch.relu(held + margin) * (scores - margin)
    sums = 0.0
    for logits, counted in ((gamma * falling, part & own), (gamma * rising, part & ~own)):
        sums = sums + torch.logsumexp(logits.masked_fill(~counted, below_every_score(logits)), 1)
    # Of a row without a positive or a negative it is 0, and NaN where a score is.
    return softplus(sums)


def _check_options(gamma, margin):
    check_number("gamma", gamma, positive=True, tensor=False)
    check_number("margin", margin, tensor=False)

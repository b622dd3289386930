"""Circle loss: each positive and negative is weighted by its distance from its optimum.

    L_i = log(1 + sum_{p in group(i), p != i} exp(gamma a_ip (1 - margin - s_ip))
                  * sum_{n not in group(i)} exp(gamma a_in (s_in - margin)))
    a_ip = relu(1 + margin - s_ip),   a_in = relu(s_in + margin),   s = cos

Source: Sun et al. 2020, "Circle Loss: A Unified Perspective of Pair Similarity Optimization",
equation 6 (equation 4 with margins), with the weights of equation 5. The weights a are constants in
the gradient, as in the paper. With weights of 1 the loss is one soft hinge on the hardest pair of a
positive and a negative; `multi_similarity` has a hinge on the positives and one on the negatives.
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
    """Circle loss: each positive and negative is weighted by its distance from its optimum.

    For rows with a class or group id, if pairs far from their optimum should count most.
    `multi_similarity` has separate steepnesses for positives and negatives; `sup_con` is a softmax
    without a margin.

    Formula and source: fastsim/losses/circle.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        references: (M, D), the rows that embeddings are compared with; None: the embeddings
            themselves, without the pair of a row with itself.
        reference_groups: (M,) integers, the groups of the references.
        own_first: whether the first N references are the embeddings themselves; the pair of row i
            and reference i is then left out.
        gamma: a positive number, the steepness.
        margin: a number; the loss drives the cosines of positives above 1 - margin, and those of
            negatives below margin.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". A row without a positive or a negative has loss 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

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
    """The specification of `circle` for scores (N, M), with the same other parameters."""
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
    kept = pair_mask(pairs, *scores.shape, scores.device)
    positive = dense_targets(pairs, *scores.shape, torch.bool, scores.device)
    constant = scores.detach()
    falling = torch.relu(1 + margin - constant) * (1 - margin - scores)
    rising = torch.relu(constant + margin) * (scores - margin)
    sums = 0.0
    for logits, counted in ((gamma * falling, kept & positive), (gamma * rising, kept & ~positive)):
        sums = sums + torch.logsumexp(logits.masked_fill(~counted, below_every_score(logits)), 1)
    # 0 for a row without a positive or a negative, NaN if a score is NaN.
    return softplus(sums)


def _check_options(gamma, margin):
    check_number("gamma", gamma, positive=True, tensor=False)
    check_number("margin", margin, tensor=False)

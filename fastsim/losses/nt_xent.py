"""NT-Xent with any number of positives: each positive pair against the row's negatives.

    N_i = log sum_{n not in group(i)} exp(z_in),   z = s / temperature
    L_ip = log(exp(z_ip) + exp(N_i)) - z_ip = softplus(N_i - z_ip),   p in group(i), p != i

s is the cosine, or with similarity="dot" the dot product.

Source: Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations",
equation 1, extended to groups of any size by leaving the other positives out of the denominator,
as in Feeney and Hughes 2023, "SINCERE: Supervised Information Noise-Contrastive Estimation
REvisited". `sup_con` keeps them in the denominator; for groups of two both losses are the same.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction, Scalar, Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.checks import check_embeddings, check_number
from fastsim.distributed import batchwise
from fastsim.losses.grouped import grouped_from_scores, grouped_loss
from fastsim.losses.module import LossModule
from fastsim.pairs import dense_targets, pair_mask, positive_counts
from fastsim.reduce import below_every_score, inverse, softplus


@embeddings_in_autocast("embeddings", "references")
@batchwise
def nt_xent(
    embeddings: Tensor,
    groups: Tensor,
    references: Tensor | None = None,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    temperature: Scalar = 0.07,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Normalised temperature-scaled cross entropy: each positive pair against the row's negatives.

    For rows with a class or group id, or two views of each image. Unlike in `sup_con`, the
    positives of a row do not compete with each other.

    Formula and source: fastsim/losses/nt_xent.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        references: (M, D), the rows that embeddings are compared with; None: the embeddings
            themselves, without the pair of a row with itself.
        reference_groups: (M,) integers, the groups of the references.
        own_first: whether the first N references are the embeddings themselves; the pair of row i
            and reference i is then left out.
        temperature: a positive number or tensor of one, which may require a gradient.
        similarity: the score, "cosine" or "dot" for the dot product without normalisation.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, the mean or sum over all positive pairs (of all ranks with `group`); or for
        reduction "none" the sum of each row, (N,). A row without a negative has loss 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> fastsim.nt_xent(embeddings, torch.tensor([0, 0, 1]), temperature=1.0)
        tensor(0.3133)
    """
    check_embeddings("embeddings", embeddings, empty=group is not None)
    check_number("temperature", temperature, positive=True)
    return grouped_loss(
        "nt_xent",
        embeddings,
        groups,
        references,
        reference_groups,
        own_first=own_first,
        kind="multi_positive",
        scale=inverse(temperature, embeddings),
        formula=partial(_losses, temperature=temperature),
        options={"temperature": temperature},
        count=_count,
        similarity=similarity,
        reduction=reduction,
        group=group,
        backend=backend,
    )


class NTXent(LossModule):
    """The module of `nt_xent`."""

    function = staticmethod(nt_xent)

    def __init__(
        self,
        *,
        own_first: bool = False,
        temperature: Scalar = 0.07,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def nt_xent_from_scores(
    scores: Tensor,
    groups: Tensor,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    temperature: Scalar = 0.07,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `nt_xent` for scores (N, M), with the same other parameters."""
    check_number("temperature", temperature, positive=True)
    return grouped_from_scores(
        scores,
        groups,
        reference_groups,
        own_first=own_first,
        formula=partial(_losses, temperature=temperature),
        count=_count,
        reduction=reduction,
    )


def _losses(scores, pairs, temperature):
    logits = scores / temperature
    kept = pair_mask(pairs, *scores.shape, scores.device)
    same = dense_targets(pairs, *scores.shape, torch.bool, scores.device)
    negative = kept & ~same
    lse = torch.logsumexp(logits.masked_fill(~negative, below_every_score(logits)), 1, keepdim=True)
    counted = kept & same & negative.any(1, keepdim=True)
    losses = torch.where(counted, softplus(lse - logits), 0.0).sum(1)
    # Not just 0: a NaN has to reach the loss of a row without a term too.
    zero = (0 * logits).masked_fill(~kept, 0.0).sum(1)
    return torch.where(counted.any(1), losses, zero)


def _count(pairs, backend):
    """The number of positive pairs."""
    return positive_counts(pairs, backend).sum()

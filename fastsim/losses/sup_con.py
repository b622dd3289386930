"""SupCon: InfoNCE with every other row of the group as a positive.

    L_i = log sum_{j != i} exp(z_ij) - mean_{p in group(i), p != i} z_ip,   z = s / temperature

s is the cosine, or with similarity="dot" the dot product.

Source: Khosla et al. 2020, "Supervised Contrastive Learning", equation 2 (L_out). For groups of two
it is NT-Xent; `info_nce` takes the index of one positive per row instead.
"""

from functools import partial

from torch import Tensor

from fastsim.annotations import Group, Reduction, Scalar, Similarity
from fastsim.autocast import embeddings_in_autocast
from fastsim.checks import check_embeddings, check_number
from fastsim.distributed import batchwise
from fastsim.losses.grouped import grouped_from_scores, grouped_loss
from fastsim.losses.module import LossModule
from fastsim.pairs import dense_targets, pair_mask, positive_counts
from fastsim.reduce import below_every_score, inverse


@embeddings_in_autocast("embeddings", "references")
@batchwise
def sup_con(
    embeddings: Tensor,
    groups: Tensor,
    references: Tensor | None = None,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    temperature: Scalar = 0.1,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Supervised contrastive loss: every other row of the group is a positive.

    For rows with a class or group id. In `nt_xent` the positives of a row do not compete with each
    other; `multi_similarity` and `circle` weight pairs by how hard they are.

    Formula and source: fastsim/losses/sup_con.py.

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
        A scalar, or (N,) for reduction "none". A row without a positive has loss 0 and does not
        count in the mean. A batch without a positive pair gives 0 with gradient 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> fastsim.sup_con(embeddings, torch.tensor([0, 0, 1]), temperature=1.0)
        tensor(0.3133)
    """
    check_embeddings("embeddings", embeddings, empty=group is not None)
    check_number("temperature", temperature, positive=True)
    return grouped_loss(
        "sup_con",
        embeddings,
        groups,
        references,
        reference_groups,
        own_first=own_first,
        kind="softmax",
        normalise=True,
        scale=inverse(temperature, embeddings),
        formula=partial(_losses, temperature=temperature),
        options={"temperature": temperature},
        count=_count,
        similarity=similarity,
        reduction=reduction,
        group=group,
        backend=backend,
    )


class SupCon(LossModule):
    """The module of `sup_con`."""

    function = staticmethod(sup_con)

    def __init__(
        self,
        *,
        own_first: bool = False,
        temperature: Scalar = 0.1,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def sup_con_from_scores(
    scores: Tensor,
    groups: Tensor,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    temperature: Scalar = 0.1,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `sup_con` for scores (N, M), with the same other parameters."""
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
    rows, columns = scores.shape
    logits = scores / temperature
    kept = pair_mask(pairs, rows, columns, scores.device)
    positive = dense_targets(pairs, rows, columns, logits.dtype, scores.device) * kept
    count = positive.sum(1)
    log_shares = logits.masked_fill(~kept, below_every_score(logits)).log_softmax(1)
    # 0 for a row without a positive, NaN if a score is NaN.
    return -(log_shares * positive).sum(1) / count.clamp(min=1)


def _count(pairs, backend):
    """The number of rows with a positive."""
    return (positive_counts(pairs, backend) > 0).sum()

"""CoSENT: a pair with the higher label should have the higher score.

    L = log(1 + sum_{label_a > label_b} exp(scale * (score_b - score_a)))

Source: Su Jianlin 2022, "CoSENT: a more effective sentence embedding scheme than Sentence-BERT".
The loss is a smooth form of the number of wrongly ordered pairs, so it trains what Spearman's
correlation measures. The scores may be cosines or cross-encoder logits. `angle` is the same loss on
angle scores, `cosent_matrix` on all entries of an N x M matrix.
"""

import torch
from torch import Tensor

from fastsim.annotations import Group, Scalar
from fastsim.backends import pick
from fastsim.checks import check_labels, check_number, check_scores
from fastsim.distributed import batchwise, join
from fastsim.engine.cosent import rank_loss
from fastsim.losses.module import LossModule
from fastsim.reduce import as_float


@batchwise
def cosent(
    scores: Tensor,
    labels: Tensor,
    *,
    scale: Scalar = 20.0,
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """CoSENT: trains scores to have the order of their labels.

    For pairs with graded labels (STS), with scores from `paired_cosine_similarity`. `angle` is the
    same on angle scores, which do not saturate; `cosine_regression` trains the values of the labels
    instead of their order.

    Formula and source: fastsim/losses/cosent.py.

    Args:
        scores: (M,).
        labels: (M,) of any real or integer dtype, none of them NaN.
        scale: a positive number or tensor of one, which may require a gradient.
        group: a process group whose ranks each give their part of the scores; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar. Pairs of equal labels add nothing; if M = 1 or all labels are equal, the loss is
        exactly 0 with gradient 0. The time is O(M log M), on a CPU O(M) for few distinct labels.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> scores, labels = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
        >>> fastsim.cosent(scores, labels)  # log 2
        tensor(0.6931)
    """
    check_scores("scores", scores, ndim=1, empty=group is not None)
    chosen = pick(backend, scores, labels, scale)
    check_labels("labels", labels, scores.shape[0], scores.device)
    check_number("scale", scale, positive=True)
    batch = join(group, "cosent", scores, labels, labels=labels, scale=scale, backend=chosen.name)
    return cosent_of(*batch.gather_both(scores, labels), scale, chosen)


def cosent_of(scores, labels, scale, backend):
    """`cosent` for checked scores and labels of all ranks."""
    if backend.name == "eager":
        return cosent_from_scores(scores, labels, scale=scale)
    return rank_loss(scores, labels, scale, backend, cosent_from_scores)


class CoSENT(LossModule):
    """The module of `cosent`."""

    function = staticmethod(cosent)

    def __init__(
        self,
        *,
        scale: Scalar = 20.0,
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def cosent_from_scores(scores: Tensor, labels: Tensor, *, scale: Scalar = 20.0) -> Tensor:
    """The specification of `cosent` for scores (M,), with the same other parameters.

    All M^2 pairs of scores are held at once.
    """
    check_scores("scores", scores, ndim=1)
    check_labels("labels", labels, scores.shape[0], scores.device)
    check_number("scale", scale, positive=True)
    logits = as_float(scores) * scale
    # Masked instead of selected: the number of selected pairs would depend on values, which
    # torch.compile cannot trace.
    terms = (logits - logits[:, None]).masked_fill(labels[:, None] <= labels, -torch.inf)
    # The appended 0 is the 1 in the logarithm; it becomes NaN if any score is NaN or infinite.
    return torch.logsumexp(torch.cat([terms.flatten(), (logits * 0).sum().reshape(1)]), 0)

"""CoSENT: a pair with the higher label should have the higher score.

    L = log(1 + sum_{label_a > label_b} exp(scale * (score_b - score_a)))

Source: Su Jianlin 2022, "CoSENT: a more effective sentence embedding scheme than Sentence-BERT";
a smooth form of the number of wrongly ordered pairs, so it trains what Spearman measures. Any
score will do: cosines, cross-encoder logits. `angle` is the same on angle scores, `cosent_matrix`
the same on every entry of an N x M matrix.
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

    For pairs with a graded label (STS), through `paired_cosine_similarity`. `angle` is the same on
    angles, which do not saturate; `cosine_regression` trains the value of a label, not its order.

    Formula and source: fastsim/losses/cosent.py.

    Args:
        scores: (M,).
        labels: (M,) of any real or integer dtype, none of them NaN.
        scale: a positive number or 0-d tensor, which may require a gradient.
        group: a process group whose ranks each give their part of the scores; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar. Equal labels contribute nothing; one pair, or all labels equal, gives exactly 0
        with zero gradient. The time is O(M log M), and O(M) on a CPU for few distinct labels.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

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
    """`cosent` of arguments that have been checked, those of all ranks."""
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
    """The specification of `cosent`: scores (M,), the other parameters as there.

    All M^2 pairs of scores are held at once.
    """
    check_scores("scores", scores, ndim=1)
    check_labels("labels", labels, scores.shape[0], scores.device)
    check_number("scale", scale, positive=True)
    logits = as_float(scores) * scale
    # Masked rather than picked: how many pairs count depends on values, which nothing can trace.
    terms = (logits - logits[:, None]).masked_fill(labels[:, None] <= labels, -torch.inf)
    # The 1 inside the logarithm; NaN or Inf in any score shows in it.
    return torch.logsumexp(torch.cat([terms.flatten(), (logits * 0).sum().reshape(1)]), 0)

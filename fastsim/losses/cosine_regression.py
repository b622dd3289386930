"""Regression on the cosine, Sentence-BERT's regression objective.

    L_i = (cos(u_i, v_i) - label_i)^2

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3. `cosent` trains the order of the
cosines instead of their values.
"""

import torch
from torch import Tensor

from fastsim.annotations import Reduction
from fastsim.backends import pick
from fastsim.checks import check_alike, check_embeddings, check_labels, check_reduction
from fastsim.losses.module import LossModule
from fastsim.scores import paired_cosines


def cosine_regression(
    u: Tensor,
    v: Tensor,
    labels: Tensor,
    *,
    reduction: Reduction = "mean",
    backend: str | None = None,
) -> Tensor:
    """Squared error of the cosines of paired rows against labels.

    For pairs with a graded label, as Sentence-BERT trained them; `cosent` asks for the labels'
    order alone, and usually gives the better rank correlation.

    Args:
        u, v: (N, D).
        labels: (N,) in [-1, 1].
        reduction: "mean", "sum" or "none".
        backend: its name; None chooses.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> rows = torch.eye(2)
        >>> fastsim.cosine_regression(rows, rows, torch.tensor([1.0, 0.0]))
        tensor(0.5000)
    """
    check_embeddings("u", u)
    check_embeddings("v", v)
    check_alike("v", v, "u", u, rows=True)
    check_labels("labels", labels, u.shape[0], u.device)
    check_reduction(reduction)
    cosines = paired_cosines(u, v, pick(backend, u, v))
    return torch.nn.functional.mse_loss(cosines, labels.to(cosines.dtype), reduction=reduction)


class CosineRegression(LossModule):
    """The module of `cosine_regression`."""

    function = staticmethod(cosine_regression)

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())

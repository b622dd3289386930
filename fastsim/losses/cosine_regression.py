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
    """Squared error of the cosines of paired rows u, v (N, D) against labels (N,) in [-1, 1].

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit. Source: see the module.
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

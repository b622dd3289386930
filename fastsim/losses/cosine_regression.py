"""Regression on the cosine, Sentence-BERT's regression objective.

    L_i = (cos(u_i, v_i) - label_i)^2

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3. `cosent` trains the order of the
cosines instead of their values.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Reduction
from fastsim.backends import pick
from fastsim.checks import (
    check_alike,
    check_embeddings,
    check_labels,
    check_order,
    check_reduction,
)
from fastsim.engine.prepared import note, once_per_signature
from fastsim.losses.module import LossModule
from fastsim.operators import traced
from fastsim.reduce import factor_of_sum, reduce
from fastsim.scores import paired_cosines


@once_per_signature
def cosine_regression(
    u: Tensor,
    v: Tensor,
    labels: Tensor,
    *,
    reduction: Reduction = "mean",
    backend: str | None = None,
) -> Tensor:
    """The squared error of the cosines of paired rows against labels.

    For pairs with graded labels, as in Sentence-BERT. `cosent` trains only the order of the labels
    and usually gives a better rank correlation.

    Formula and source: fastsim/losses/cosine_regression.py.

    Args:
        u, v: (N, D).
        labels: (N,) of any real dtype, none of them NaN, best within [-1, 1] as cosines are.
        reduction: "mean", "sum" or "none".
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

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
    loss_of = partial(_loss, reduction=reduction, backend=pick(backend, u, v, labels))
    loss = loss_of(u, v, labels)
    note((u, v, labels), partial(_with_checked_labels, loss_of=loss_of), loss)
    return loss


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


def _with_checked_labels(u, v, labels, *, loss_of):
    loss = loss_of(u, v, labels)
    # A NaN label makes the loss NaN, so reading one number replaces reading all labels.
    if loss.dim() or loss.device.type != "cpu" or loss.isnan():
        check_order("labels", labels)
    return loss


def _loss(u, v, labels, *, reduction, backend):
    sides = u, v, labels
    learnt = torch.is_grad_enabled() and any(side.requires_grad for side in sides)
    if learnt or reduction == "none" or traced() or backend.name == "eager":
        cosines = paired_cosines(u, v, backend)
        return reduce((cosines - labels.to(cosines.dtype)).square(), reduction)
    return backend.paired_squared_errors(*sides, factor_of_sum(reduction, u.shape[0]))

"""AnglE: CoSENT on angle scores of the embeddings read as complex vectors.

The halves of u = (a, b) and v = (c, d) are real and imaginary parts: a + ib and c + id. With
q = (a + ib) (c - id) / (|u| |v|), multiplied entry by entry, the score |sum(Re q) + sum(Im q)| is

    score = sqrt(2) * |cos((a + b, b - a), v)|

Source: Li and Li 2023, "AnglE-optimized Text Embeddings", equations 5 to 8.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Group, Scalar
from fastsim.backends import pick
from fastsim.checks import (
    check_alike,
    check_embeddings,
    check_labels,
    check_number,
    check_order,
)
from fastsim.distributed import batchwise
from fastsim.engine.prepared import note, once_per_signature
from fastsim.losses.cosent import cosent, cosent_of
from fastsim.losses.module import LossModule
from fastsim.precision import compute_dtype
from fastsim.scores import paired_cosines


def angle_similarity(u: Tensor, v: Tensor, *, backend: str | None = None) -> Tensor:
    """Computes the angle scores of paired rows.

    Formula and source: fastsim/losses/angle.py.

    Args:
        u, v: (N, D), D even.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (N,) in [0, sqrt(2)], differentiable; 0 for u = 0 or v = 0.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> fastsim.angle_similarity(torch.eye(2), torch.eye(2))
        tensor([1.0000, 1.0000])
    """
    _check_halves(u, v)
    return _angle_scores(u, v, pick(backend, u, v))


def _check_halves(u, v, *, empty=False):
    check_embeddings("u", u, empty=empty)
    check_embeddings("v", v, empty=empty)
    check_alike("v", v, "u", u, rows=True)
    if u.shape[1] % 2:
        raise ValueError(f"u: wanted an even width (two halves), got {u.shape[1]}")


def _angle_scores(u, v, backend):
    a, b = u.to(compute_dtype(u)).chunk(2, 1)
    return 2**0.5 * paired_cosines(torch.cat([a + b, b - a], 1), v, backend).abs()


@once_per_signature
@batchwise
def angle(
    u: Tensor,
    v: Tensor,
    labels: Tensor,
    *,
    scale: Scalar = 20.0,
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """CoSENT on the angle scores of paired rows.

    For pairs with graded labels (STS) whose cosines are near 1, where `cosent` has little gradient.

    Formula and source: fastsim/losses/angle.py.

    Args:
        u, v: (N, D), D even.
        labels: (N,) of any real or integer dtype, none of them NaN.
        scale: a positive number or tensor of one, which may require a gradient.
        group: a process group whose ranks each give a part of the pairs; see `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, as from `cosent`.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> rows = torch.eye(2)
        >>> fastsim.angle(rows, rows, torch.tensor([1.0, 0.0]))  # equal scores: log 2
        tensor(0.6931)
    """
    check_embeddings("u", u, empty=group is not None)
    check_labels("labels", labels, u.shape[0], u.device)
    check_number("scale", scale, positive=True)
    _check_halves(u, v, empty=group is not None)
    chosen = pick(backend, u, v, labels, scale)
    if group is not None or isinstance(scale, Tensor):
        scores = _angle_scores(u, v, chosen)
        return cosent(scores, labels, scale=scale, group=group, backend=backend)
    loss_of = partial(_loss, scale=scale, backend=chosen)
    loss = loss_of(u, v, labels)
    note((u, v, labels), partial(_with_checked_labels, loss_of=loss_of), loss)
    return loss


def _loss(u, v, labels, *, scale, backend):
    return cosent_of(_angle_scores(u, v, backend), labels, scale, backend)


def _with_checked_labels(u, v, labels, *, loss_of):
    check_order("labels", labels)
    return loss_of(u, v, labels)


class Angle(LossModule):
    """The module of `angle`."""

    function = staticmethod(angle)

    def __init__(
        self,
        *,
        scale: Scalar = 20.0,
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())

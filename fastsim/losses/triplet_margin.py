"""Triplet margin loss on Euclidean distances, Sentence-BERT's triplet objective.

    L_i = relu(|a_i - p_i| - |a_i - n_i| + margin)

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3 (margin 1 there); Schroff et al.
2015. The gradient of a distance of 0 is 0, not NaN. The loss computes no scores of all pairs;
`full_triplet` compares the whole batch.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Reduction
from fastsim.backends import get, pick
from fastsim.backends.rows import gap_gradients, norms, triplet_losses
from fastsim.checks import check_alike, check_embeddings, check_number, check_reduction
from fastsim.distributed import learnt_number
from fastsim.engine.prepared import note, once_per_signature
from fastsim.losses.module import LossModule
from fastsim.operators import define, differentiable_again, traced
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float, factor_of_sum, reduce


@once_per_signature
def triplet_margin(
    anchors: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    margin: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Euclidean triplet loss, row by row.

    For triplets that are already mined, as in Sentence-BERT. `info_nce` with hard negatives also
    uses the other rows of the batch as negatives.

    Formula and source: fastsim/losses/triplet_margin.py.

    Args:
        anchors, positives, negatives: (N, D) each.
        margin: a number, by how much the positive should be closer than the negative.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.

    Example:
        >>> anchor, positive, negative = torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)
        >>> fastsim.triplet_margin(anchor, positive, negative)
        tensor(1.)
    """
    check_embeddings("anchors", anchors)
    for name, value in (("positives", positives), ("negatives", negatives)):
        check_embeddings(name, value)
        check_alike(name, value, "anchors", anchors, rows=True)
    margin = learnt_number(margin)
    check_number("margin", margin)
    check_reduction(reduction)
    sides = anchors, positives, negatives
    chosen = pick(None, *sides, margin)
    loss_of = partial(_loss, margin=margin, reduction=reduction, backend=chosen)
    loss = loss_of(*sides)
    note(sides, loss_of, loss)
    return loss


class TripletMargin(LossModule):
    """The module of `triplet_margin`."""

    function = staticmethod(triplet_margin)

    def __init__(
        self,
        *,
        margin: float = 1.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(locals())


def _loss(*sides, margin, reduction, backend):
    if backend.name == "eager":
        return _formula(*sides, margin, reduction)
    learnt = (*sides, margin) if isinstance(margin, Tensor) else sides
    if torch.is_grad_enabled() and any(side.requires_grad for side in learnt):
        return _TripletMargin.apply(*sides, margin, reduction, backend.name)
    return _reduced(*sides, margin, reduction, backend.name)[-1]


def _formula(anchors, positives, negatives, margin, reduction):
    anchors = as_float(anchors)
    near, far = norms(anchors - positives), norms(anchors - negatives)
    losses = torch.relu(near - far + margin)
    return reduce(losses.masked_fill(far == torch.inf, torch.nan), reduction)


def _reduced(anchors, positives, negatives, margin, reduction, backend):
    """(both distances (N,), the reduced losses)."""
    sides = anchors, positives, negatives
    if not traced() and not isinstance(margin, Tensor):
        factor = factor_of_sum(reduction, anchors.shape[0])
        return get(backend).triplet_losses(*sides, margin, factor)
    near, far = _distances(*sides, backend)
    return near, far, reduce(triplet_losses(near, far, margin), reduction)


class _TripletMargin(torch.autograd.Function):
    """The whole loss as one function: its backward pass allocates only the three gradients.

    The gradient of the anchors is minus the sum of the other two.
    """

    @staticmethod
    def forward(ctx, anchors, positives, negatives, margin, reduction, backend):
        sides = anchors, positives, negatives
        near, far, loss = _reduced(*sides, margin, reduction, backend)
        learnt = margin if isinstance(margin, Tensor) else None
        ctx.save_for_backward(*sides, learnt, near, far)
        ctx.margin, ctx.reduction, ctx.backend = margin, reduction, backend
        return loss

    @staticmethod
    @differentiable_again(
        lambda ctx, _, *inputs: _formula(
            *inputs[:3], ctx.margin if inputs[3] is None else inputs[3], ctx.reduction
        ),
        inputs=4,
    )
    def backward(ctx, saved, grad):
        *sides, learnt, near, far = saved
        *needs_grad, want_margin = ctx.needs_input_grad[:4]
        factor = factor_of_sum(ctx.reduction, near.shape[0])
        if not traced() and learnt is None:
            options = {"needs_grad": needs_grad, "margin": ctx.margin, "factor": factor}
            grads = get(ctx.backend).triplet_losses_backward(grad, *sides, near, far, **options)
            return *grads, None, None, None
        grad = gap_gradients(grad, near, far, ctx.margin if learnt is None else learnt, factor)
        grads = [None] * 3
        if any(needs_grad):
            grads = _distances_backward(grad, *sides, near, far, list(needs_grad), ctx.backend)
            grads = [one if need else None for one, need in zip(grads, needs_grad, strict=True)]
        margin_grad = grad.sum().to(learnt.dtype) if want_margin else None
        return *grads, margin_grad, None, None


# ---- the registered operators; a gradient that is not needed is empty ----


def _forward(anchors, positives, negatives, backend):
    return get(backend).triplet_distances(anchors, positives, negatives)


def _fake(anchors, positives, negatives, backend):
    near, far = (
        anchors.new_empty(anchors.shape[0], dtype=compute_dtype(anchors)) for _ in range(2)
    )
    return near, far


def _backward(grad, anchors, positives, negatives, near, far, needs_grad, backend):
    sides = anchors, positives, negatives
    grads = get(backend).triplet_distances_backward(grad, *sides, near, far, needs_grad)
    return tuple(anchors.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(grad, anchors, positives, negatives, near, far, needs_grad, backend):
    return tuple(anchors.new_empty(anchors.shape if need else 0) for need in needs_grad)


_SIDES = "Tensor anchors, Tensor positives, Tensor negatives"
_distances = define(
    "triplet_distances", f"({_SIDES}, str backend) -> (Tensor, Tensor)", _forward, _fake
)
_distances_backward = define(
    "triplet_distances_backward",
    f"(Tensor grad, {_SIDES}, Tensor near, Tensor far, bool[] needs_grad, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)

"""Triplet margin loss on Euclidean distances, Sentence-BERT's triplet objective.

    L_i = relu(|a_i - p_i| - |a_i - n_i| + margin)

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3 (margin 1 there); Schroff et al.
2015. At distance 0 the gradient of that distance is taken as 0, not NaN. It needs no scores of
all pairs: `full_triplet` is the one that looks at the whole batch.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Reduction
from fastsim.backends import get, pick
from fastsim.backends.rows import norms
from fastsim.checks import check_alike, check_embeddings, check_number, check_reduction
from fastsim.engine.prepared import Prepared, note, once_per_signature
from fastsim.losses.module import LossModule
from fastsim.operators import define, differentiable_again
from fastsim.reduce import as_float, reduce
from fastsim.scores import compute_dtype


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

    For triplets that somebody mined, as Sentence-BERT had them. `info_nce` with hard negatives
    takes the whole batch for negatives as well.

    Args:
        anchors, positives, negatives: (N, D) each.
        margin: a number, by how much the positive is to be closer than the negative.
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
    check_number("margin", margin)
    check_reduction(reduction)
    sides = anchors, positives, negatives
    small = Prepared(partial(_loss, margin=margin, reduction=reduction, backend=pick(None, *sides)))
    loss = small(*sides)
    note(sides, small, loss)
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
        gap = _gap_formula(None, *sides)
    elif torch.is_grad_enabled() and any(side.requires_grad for side in sides):
        gap = _Gap.apply(*sides, backend.name)
    else:
        near, far = _distances(*sides, backend.name)
        gap = near - far
    return reduce(torch.relu(gap + margin), reduction)


def _gap_formula(ctx, anchors, positives, negatives):
    anchors = as_float(anchors)
    return norms(anchors - positives) - norms(anchors - negatives)


class _Gap(torch.autograd.Function):
    """The two distances in one function: what the anchors get is what the others get, turned round.

    So a backward pass makes the three gradients and no other N x D numbers.
    """

    @staticmethod
    def forward(ctx, anchors, positives, negatives, backend):
        near, far = _distances(anchors, positives, negatives, backend)
        ctx.save_for_backward(anchors, positives, negatives, near, far)
        ctx.backend = backend
        return near - far

    @staticmethod
    @differentiable_again(_gap_formula, inputs=3)
    def backward(ctx, grad):
        wants = list(ctx.needs_input_grad[:3])
        grads = _distances_backward(grad, *ctx.saved_tensors, wants, ctx.backend)
        return *(grad if want else None for grad, want in zip(grads, wants, strict=True)), None


# ---- the registered operators; a gradient that is not wanted is empty ----


def _forward(anchors, positives, negatives, backend):
    return get(backend).triplet_distances(anchors, positives, negatives)


def _fake(anchors, positives, negatives, backend):
    near, far = (
        anchors.new_empty(anchors.shape[0], dtype=compute_dtype(anchors)) for _ in range(2)
    )
    return near, far


def _backward(grad, anchors, positives, negatives, near, far, wants, backend):
    sides = anchors, positives, negatives
    grads = get(backend).triplet_distances_backward(grad, *sides, near, far, wants)
    return tuple(anchors.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(grad, anchors, positives, negatives, near, far, wants, backend):
    return tuple(anchors.new_empty(anchors.shape if want else 0) for want in wants)


_SIDES = "Tensor anchors, Tensor positives, Tensor negatives"
_distances = define(
    "triplet_distances", f"({_SIDES}, str backend) -> (Tensor, Tensor)", _forward, _fake
)
_distances_backward = define(
    "triplet_distances_backward",
    f"(Tensor grad, {_SIDES}, Tensor near, Tensor far, bool[] wants, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)

"""Triplet margin loss on Euclidean distances, Sentence-BERT's triplet objective.

    L_i = relu(|a_i - p_i| - |a_i - n_i| + margin)

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3 (margin 1 there); Schroff et al.
2015. At distance 0 the gradient of that distance is taken as 0, not NaN. It needs no scores of
all pairs: `full_triplet` is the one that looks at the whole batch.
"""

import torch
from torch import Tensor

from fastsim.annotations import Reduction
from fastsim.backends.rows import norms
from fastsim.checks import check_alike, check_embeddings, check_number, check_reduction
from fastsim.losses.module import LossModule
from fastsim.operators import differentiable_again, transformed
from fastsim.reduce import as_float, reduce


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
    gap = _gap_formula(None, *sides) if transformed(*sides) else _Gap.apply(*sides)
    return reduce(torch.relu(gap + margin), reduction)


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


def _gap_formula(ctx, anchors, positives, negatives):
    anchors = as_float(anchors)
    return norms(anchors - positives) - norms(anchors - negatives)


class _Gap(torch.autograd.Function):
    """|a_i - p_i| - |a_i - n_i| (N,) in the compute type, of three (N, D).

    The two distances in one function: what the anchors get is what the others get, turned round,
    so a backward pass makes the three gradients and no other N x D numbers.
    """

    @staticmethod
    def forward(ctx, anchors, positives, negatives):
        near, far = as_float(positives) - anchors, as_float(negatives) - anchors
        near_norm, far_norm = (torch.linalg.vector_norm(d, dim=1) for d in (near, far))
        ctx.save_for_backward(anchors, positives, negatives, near_norm, far_norm)
        return near_norm - far_norm

    @staticmethod
    @differentiable_again(_gap_formula, inputs=3)
    def backward(ctx, grad):
        anchors, positives, negatives, near_norm, far_norm = ctx.saved_tensors
        grad_positives = (as_float(positives) - anchors).mul_(_over(grad, near_norm)[:, None])
        grad_negatives = (as_float(negatives) - anchors).mul_(_over(-grad, far_norm)[:, None])
        wants_anchors, *wants = ctx.needs_input_grad
        grad_anchors = (grad_positives + grad_negatives).neg_() if wants_anchors else None
        grads = (
            grad_anchors,
            *(
                grad if want else None
                for grad, want in zip((grad_positives, grad_negatives), wants, strict=True)
            ),
        )
        return tuple(grad if grad is None else grad.to(anchors.dtype) for grad in grads)


def _over(grad, norm):
    """grad / norm (N,), 0 where the norm is."""
    return (grad / norm).masked_fill_(norm == 0, 0.0)

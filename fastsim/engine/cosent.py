"""CoSENT over a list of scores as a registered operator: a sort and two scans, O(M log M).

L = log(1 + sum_{label_a > label_b} exp(z_b - z_a)),  z = scale * score
"""

import torch
from torch import Tensor

from fastsim.backends import get
from fastsim.operators import define, differentiable_again
from fastsim.precision import compute_dtype


def rank_loss(scores, labels, scale, backend, formula):
    """The CoSENT loss () of scores (M,) and labels (M,); scale is a number or 0-d tensor.

    formula: the same loss in plain torch, for second derivatives.
    """
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=compute_dtype(scores), device=scores.device)
    if not (torch.is_grad_enabled() and (scores.requires_grad or scale.requires_grad)):
        return _cosent(scores, labels, scale, False, backend.name)[0]
    return _RankLoss.apply(scores, scale, labels, backend.name, formula)


def _forward(scores, labels, scale, want_score_grad, backend):
    chosen = get(backend)
    loss, score_grad = chosen.cosent(scores, labels, chosen.number(scale), want_score_grad)
    return loss, loss.new_empty(0) if score_grad is None else score_grad


def _forward_fake(scores, labels, scale, want_score_grad, backend):
    dtype = compute_dtype(scores)
    shape = scores.shape if want_score_grad else (0,)
    return scores.new_empty((), dtype=dtype), scores.new_empty(shape, dtype=dtype)


_cosent = define(
    "cosent",
    "(Tensor scores, Tensor labels, Tensor scale, bool want_score_grad, str backend)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)


class _RankLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, scale, labels, backend, formula):
        want = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        loss, score_grad = _cosent(scores, labels, scale, want, backend)
        ctx.save_for_backward(scores, scale, labels, score_grad)
        ctx.formula = formula
        return loss

    @staticmethod
    @differentiable_again(
        lambda ctx, saved, scores, scale: ctx.formula(scores, saved[2], scale=scale),
        inputs=2,
    )
    def backward(ctx, saved, grad):
        scores, scale, _, score_grad = saved
        grad_scores = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_scores = (grad * score_grad).to(scores.dtype)
        if ctx.needs_input_grad[1]:
            # z = scale * score: dL/dscale = sum score dL/dscore / scale.
            grad_scale = (grad * torch.dot(score_grad, scores.to(score_grad.dtype)) / scale).to(
                scale.dtype
            )
        return grad_scores, grad_scale, None, None, None

"""CoSENT over a list of scores as a registered operator: a sort and two scans, O(M log M).

L = log(1 + sum_{label_a > label_b} exp(z_b - z_a)),  z = scale * score
"""

import torch
from torch import Tensor

from fastsim import backends
from fastsim.scores import compute_dtype


def rank_loss(scores, labels, scale, backend):
    """CoSENT of scores (M,) and labels (M,), `scale` a number or 0-d tensor -> scalar."""
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=compute_dtype(scores), device=scores.device)
    want = torch.is_grad_enabled() and (scores.requires_grad or scale.requires_grad)
    return torch.ops.fastsim.cosent(scores, labels, scale, want, backend.name)[0]


@torch.library.custom_op("fastsim::cosent", mutates_args=())
def _cosent(
    scores: Tensor, labels: Tensor, scale: Tensor, want_slope: bool, backend: str
) -> tuple[Tensor, Tensor]:
    chosen = backends.get(backend)
    loss, slope = chosen.cosent(scores, labels, chosen.number(scale), want_slope)
    return loss, loss.new_empty(0) if slope is None else slope


@_cosent.register_fake
def _(scores, labels, scale, want_slope, backend):
    dtype = compute_dtype(scores)
    shape = scores.shape if want_slope else (0,)
    return scores.new_empty((), dtype=dtype), scores.new_empty(shape, dtype=dtype)


def _setup_context(ctx, inputs, output):
    scores, _, scale, _, _ = inputs
    ctx.save_for_backward(scores, scale, output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _):
    scores, scale, slope = ctx.saved_tensors
    if grad is None:
        return None, None, None, None, None
    grad_scores = grad_scale = None
    if ctx.needs_input_grad[0]:
        grad_scores = (grad * slope).to(scores.dtype)
    if ctx.needs_input_grad[2]:
        # z = scale * score: dL/dscale = sum score dL/dscore / scale.
        grad_scale = (grad * torch.dot(slope, scores.to(slope.dtype)) / scale).to(scale.dtype)
    return grad_scores, None, grad_scale, None, None


_cosent.register_autograd(_autograd, setup_context=_setup_context)

"""What the differentiable operations of a tile loss have in common: scalars in, gradients out."""

import torch
from torch import Tensor

from fastsim.precision import wide_dtype


def wants_of(*sides):
    """Which of them want a gradient."""
    if not torch.is_grad_enabled():
        return [False] * len(sides)
    return [isinstance(side, Tensor) and side.requires_grad for side in sides]


def as_scalar(value, dtype, device):
    """A number or 0-d tensor as a 0-d tensor."""
    if isinstance(value, Tensor):
        # What leaves a CPU is copied at once or kept until it is: nothing waits.
        return value.to(device=device, dtype=dtype, non_blocking=value.device.type == "cpu")
    return torch.full((), value, dtype=dtype, device=device)


def fake_gradients(call, dtype):
    sides = zip((call.x, call.y), call.products, strict=True)
    grads = [side.new_empty(side.shape if want else 0, dtype=dtype) for side, want in sides]
    return [*grads, call.x.new_empty(2, dtype=wide_dtype(call.x.device))]


def gradients_of(ctx, parts, count):
    """Those of the `count` inputs of the Function, from dL/dx, dL/dy and those of the scalars."""
    wants, (of_inputs, of_scalars) = ctx.wants, ctx.dtypes
    grad_x, grad_y, (grad_scale, grad_bias) = parts
    grads = (
        grad_x.to(of_inputs) if wants[0] else None,
        grad_y.to(of_inputs) if wants[1] else None,
        grad_scale.to(of_scalars) if wants[2] else None,
        grad_bias.to(of_scalars) if wants[3] else None,
    )
    return (*grads, *(None,) * (count - len(grads)))

"""What the differentiable operations of a tile loss share: operands, formula, gradients."""

import torch
from torch import Tensor

from fastsim.backends import get
from fastsim.backends.rows import multiplied
from fastsim.operators import ONCE
from fastsim.precision import wide_dtype
from fastsim.scores import compute_dtype, dense_scores


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


def as_operands(x, scale, bias, weights):
    """scale and bias as 0-d tensors; weights of rows, a number or None, as (N,), () or None."""
    dtype = compute_dtype(x)
    if weights is not None and not isinstance(weights, Tensor):
        weights = torch.full((), weights, dtype=dtype, device=x.device)
    return as_scalar(scale, dtype, x.device), as_scalar(bias, dtype, x.device), weights


def once_each(arguments):
    """The arguments of an operator, each tensor once: torch.compile does not take one twice.

    A user may give one twice: ids that are positives too, of rows and columns.
    """
    if not torch.compiler.is_compiling():
        return arguments
    return [a.view_as(a) if isinstance(a, Tensor) else a for a in arguments]


def dense_losses(ctx, x, y, scale, bias):
    """The losses (N,) in plain torch; y=None: of x with itself."""
    if ctx.formula is None:
        raise RuntimeError(ONCE)
    scores = dense_scores(x, y, get("eager"), "cosine" if ctx.cosine else "dot")
    return ctx.formula(scores, scale, bias)


def sum_of_prefixes(loss, x, y, widths, factors):
    """sum_k factors_k loss(x[:, :widths_k], y[:, :widths_k]); y=None: of x with itself."""
    total = 0.0
    for width, factor in zip(widths, factors, strict=True):
        total = total + factor * loss(x[:, :width], None if y is None else y[:, :width])
    return total


def fake_gradients(call, dtype):
    sides = zip((call.x, call.y), call.wants[:2], strict=True)
    grads = [side.new_empty(side.shape if want else 0, dtype=dtype) for side, want in sides]
    return [*grads, call.x.new_empty(2, dtype=wide_dtype(call.x.device))]


def graph_ends():
    """Whether the graph ends with this backward pass: nobody asks for its gradients again."""
    kept = torch._C._autograd._get_current_graph_task_keep_graph
    return not (torch.compiler.is_compiling() or kept())


def is_one(grad):
    """Whether the gradient of a loss is 1; asked only where looking costs nothing, on a CPU."""
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.item() == 1


def found_times(parts, grad, wants):
    """The gradients that a forward pass has found, multiplied by the gradient of its loss.

    They are overwritten where the graph ends here.
    """
    spent = graph_ends()
    return parts if spent and is_one(grad) else multiplied(parts, grad, wants, spent=spent)


def gradients_of(ctx, parts, count):
    """Those of the `count` inputs of the Function, from dL/dx, dL/dy and those of the scalars."""
    wants, (of_inputs, of_scalars) = ctx.wants, ctx.dtypes
    grad_x, grad_y, of_numbers = parts
    grads = (
        grad_x.to(of_inputs) if wants[0] else None,
        grad_y.to(of_inputs) if wants[1] else None,
        of_numbers[0].to(of_scalars) if wants[2] else None,
        of_numbers[1].to(of_scalars) if wants[3] else None,
    )
    return (*grads, *(None,) * (count - len(grads)))

"""What the differentiable operations of tile losses share: operands, formulas, gradients."""

import torch
from torch import Tensor

from fastsim.backends import get
from fastsim.backends.rows import multiplied
from fastsim.operators import ONCE
from fastsim.precision import compute_dtype, wide_dtype
from fastsim.scores import dense_scores


def needs_grad_of(*sides):
    """[whether each side, a tensor, a number or None, needs a gradient]."""
    if not torch.is_grad_enabled():
        return [False] * len(sides)
    return [isinstance(side, Tensor) and side.requires_grad for side in sides]


def as_scalar(value, dtype, device):
    """A number or 0-d tensor as a 0-d tensor."""
    if isinstance(value, Tensor):
        # From a CPU tensor the copy need not be waited for: torch keeps the source until then.
        return value.to(device=device, dtype=dtype, non_blocking=value.device.type == "cpu")
    return torch.full((), value, dtype=dtype, device=device)


def as_operands(x, scale, bias, weights):
    """scale and bias as 0-d tensors; weights, a tensor, a number or None, as a tensor or None."""
    dtype = compute_dtype(x)
    if weights is not None and not isinstance(weights, Tensor):
        weights = torch.full((), weights, dtype=dtype, device=x.device)
    return as_scalar(scale, dtype, x.device), as_scalar(bias, dtype, x.device), weights


def once_each(arguments):
    """The arguments of an operator, each tensor a different object while torch.compile traces.

    torch.compile refuses an operator that gets the same tensor twice. A user may pass one twice,
    such as ids of rows that are also ids of columns.
    """
    if not torch.compiler.is_compiling():
        return arguments
    return [a.view_as(a) if isinstance(a, Tensor) else a for a in arguments]


def dense_losses(ctx, x, y, scale, bias):
    """The losses (N,) in plain torch; y=None compares x with itself."""
    if ctx.formula is None:
        raise RuntimeError(ONCE)
    scores = dense_scores(x, y, get("eager"), "cosine" if ctx.cosine else "dot")
    return ctx.formula(scores, scale, bias)


def sum_of_prefixes(loss, x, y, widths, factors):
    """sum_k factors_k loss(x[:, :widths_k], y[:, :widths_k]); y=None compares x with itself."""
    total = 0.0
    for width, factor in zip(widths, factors, strict=True):
        total = total + factor * loss(x[:, :width], None if y is None else y[:, :width])
    return total


def fake_gradients(call, dtype):
    """Memory of the shapes of the gradients that an operator returns."""
    sides = zip((call.x, call.y), call.needs_grad[:2], strict=True)
    grads = [side.new_empty(side.shape if want else 0, dtype=dtype) for side, want in sides]
    return [*grads, call.x.new_empty(2, dtype=wide_dtype(call.x.device))]


def graph_ends():
    """Whether this backward pass frees the graph, so that no other backward pass can follow."""
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
    return not (torch.compiler.is_compiling() or keeps_graph())


def is_one(grad):
    """Whether the gradient of a loss is 1; False on a GPU, where the answer would mean waiting."""
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.item() == 1


def times_loss_gradient(parts, grad, needed):
    """The gradients of the inputs that the forward pass computed, times the loss's gradient ().

    parts: these gradients; overwritten if no other backward pass can follow. needed: a flag for
        each of them.
    """
    spent = graph_ends()
    return parts if spent and is_one(grad) else multiplied(parts, grad, needed, spent=spent)


def gradients_of(ctx, parts, count):
    """What the backward pass of a Function returns: the gradients of its `count` inputs.

    The first inputs are x, y, scale and bias; the others have no gradient.
    parts: dL/dx, dL/dy, dL/d(scale, bias) (2,).
    """
    needs_grad, (input_dtype, scalar_dtype) = ctx.needs_grad, ctx.dtypes
    grad_x, grad_y, grad_scalars = parts
    grads = (
        grad_x.to(input_dtype) if needs_grad[0] else None,
        grad_y.to(input_dtype) if needs_grad[1] else None,
        grad_scalars[0].to(scalar_dtype) if needs_grad[2] else None,
        grad_scalars[1].to(scalar_dtype) if needs_grad[3] else None,
    )
    return (*grads, *(None,) * (count - len(grads)))

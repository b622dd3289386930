"""Runs a problem with a backend on a device: its value and its gradients."""

from dataclasses import replace

import torch

from fastsim.precision import compute_dtype


def on_device(problem, device, dtype=None):
    """The problem with its tensors on a device, floating-point ones converted to a dtype."""

    def move(value):
        if callable(value):
            value = value()
        if isinstance(value, torch.Tensor):
            convert = dtype is not None and value.is_floating_point()
            return value.to(device, dtype if convert else value.dtype)
        return tuple(map(move, value)) if isinstance(value, tuple) else value

    return replace(
        problem,
        leaves=[move(leaf) for leaf in problem.leaves],
        arguments=tuple(map(move, problem.arguments)),
        options={name: move(value) for name, value in problem.options.items()},
    )


def outputs(problem, backend, device, dtype=None, *, with_grad=None, layout=torch.clone):
    """[value, gradients of the leaves, gradients of the learnt options].

    with_grad: the indices of the leaves that have a gradient; the other gradients are None. By
    default all leaves and learnt options have one. layout: a function that copies a leaf into the
    memory layout to compute with.
    """
    problem = on_device(problem, device, dtype)
    leaves = [
        layout(leaf.detach()).requires_grad_(with_grad is None or index in with_grad)
        for index, leaf in enumerate(problem.leaves)
    ]
    compute = compute_dtype(leaves[0])
    learnt = {
        name: torch.full((), value, dtype=compute, device=device, requires_grad=with_grad is None)
        for name, value in problem.learnt.items()
    }
    value = problem.loss(*leaves, *problem.arguments, **problem.options, **learnt, backend=backend)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=device)
    inputs = (*leaves, *learnt.values())
    differentiable = [tensor for tensor in inputs if tensor.requires_grad]
    total = (value * weights.view(value.shape)).sum()
    computed = iter(torch.autograd.grad(total, differentiable) if differentiable else ())
    gradients = [next(computed) if tensor.requires_grad else None for tensor in inputs]
    return [value.detach(), *gradients]


def unaligned(leaf):
    """A copy of rows (N, D) with row stride D + 1 that starts at the second number in memory."""
    rows, width = leaf.shape
    return leaf.new_empty(rows, width + 1)[:, 1:].copy_(leaf)


def by_columns(leaf):
    """A copy of rows (N, D) in column-major order."""
    return leaf.T.contiguous().T

"""What a backend makes of a problem, on a device: its value and its gradients."""

from dataclasses import replace

import torch

from fastsim.precision import compute_dtype


def on_device(problem, device, dtype=None):
    """The problem with its tensors on a device, those of floating point in that dtype."""

    def there(value):
        if callable(value):
            value = value()
        if isinstance(value, torch.Tensor):
            wide = dtype is not None and value.is_floating_point()
            return value.to(device, dtype if wide else value.dtype)
        return tuple(map(there, value)) if isinstance(value, tuple) else value

    return replace(
        problem,
        leaves=[there(leaf) for leaf in problem.leaves],
        given=tuple(map(there, problem.given)),
        options={name: there(value) for name, value in problem.options.items()},
    )


def outputs(problem, backend, device, dtype=None, *, wanted=None, laid=torch.clone):
    """[value, gradients of the leaves, gradients of the learnt options].

    wanted: the places of the leaves whose gradients are, alone, None in the place of others; None:
    all, and those of the learnt options. laid: makes the copy of a leaf that is computed with.
    """
    problem = on_device(problem, device, dtype)
    leaves = [
        laid(leaf.detach()).requires_grad_(wanted is None or place in wanted)
        for place, leaf in enumerate(problem.leaves)
    ]
    compute = compute_dtype(leaves[0])
    learnt = {
        name: torch.full((), value, dtype=compute, device=device, requires_grad=wanted is None)
        for name, value in problem.learnt.items()
    }
    value = problem.loss(*leaves, *problem.given, **problem.options, **learnt, backend=backend)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=device)
    asked = [tensor for tensor in (*leaves, *learnt.values()) if tensor.requires_grad]
    total = (value * weights.view(value.shape)).sum()
    found = iter(torch.autograd.grad(total, asked) if asked else ())
    gradients = [next(found) if t.requires_grad else None for t in (*leaves, *learnt.values())]
    return [value.detach(), *gradients]


def off_by_one(leaf):
    """A copy of rows (N, D) that begins one number into its memory, its rows D + 1 numbers apart:
    nothing is aligned.
    """
    rows, width = leaf.shape
    return leaf.new_empty(rows, width + 1)[:, 1:].copy_(leaf)


def by_columns(leaf):
    """A copy of rows (N, D) whose memory goes down the columns."""
    return leaf.T.contiguous().T

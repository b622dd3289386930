"""Sums, minima and concatenations of tensors over the ranks of a process group.

Registered operators take strings instead of groups. So `know` registers a group under its name.
"""

import torch
import torch.distributed as dist

from fastsim.autocast import joined
from fastsim.groups import all_gather
from fastsim.operators import once_differentiable
from fastsim.precision import compute_dtype

_groups = {}  # by name


def know(group):
    """Registers a group under its name."""
    _groups[group.group_name] = group


def all_reduce_sum(value, name):
    """The sum of a tensor over the ranks of the group of that name."""
    return _all_reduce(value, dist.ReduceOp.SUM, name)


def all_reduce_min(value, name):
    """The minimum of a tensor over the ranks of the group of that name."""
    return _all_reduce(value, dist.ReduceOp.MIN, name)


def _all_reduce(value, operation, name):
    # Contiguous: a reduction adds memory in its order, which could differ between ranks.
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, operation, _groups[name])
    return value


def merge_exponentials(top, exponentials, scale, name):
    """(maxima of scores, sums of exponentials relative to them), merged over the ranks."""
    highest = -all_reduce_min(-top, name)
    return highest, all_reduce_sum(exponentials * (scale * (top - highest)).exp(), name)


def sum_with_gradient(value, name):
    """`all_reduce_sum`, differentiable."""
    return _Total.apply(value, name)


class _Total(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, value, name):
        ctx.name = name
        return all_reduce_sum(value, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_reduce_sum(grad, ctx.name), None


def gather(part, counts, group):
    """The ranks' parts (counts[rank], ...) joined in order, differentiable; None stays None."""
    if part is None:
        return None
    return (
        _Gather.apply(part, counts, group)
        if part.requires_grad
        else gather_values(part, counts, group)
    )


class _Gather(torch.autograd.Function):
    """The ranks' parts joined; the gradient of a part is summed over the ranks."""

    @staticmethod
    def forward(ctx, part, counts, group):
        ctx.counts, ctx.group = counts, group
        return gather_values(part, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.counts, ctx.group), None, None


def gather_values(part, counts, group):
    """`gather` without a gradient."""
    if part.dtype == torch.int16:  # NCCL does not transfer it
        return gather_values(part.int(), counts, group).short()
    most = max(counts)
    out = part.new_empty(len(counts) * most, *part.shape[1:])
    all_gather(out, _padded(part.detach(), most), group)
    if min(counts) == most:
        return out
    return joined([piece[:count] for piece, count in zip(out.split(most), counts, strict=True)])


def _reduce_scatter(grad, counts, group):
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    most = max(counts)
    # 16-bit gradients are summed in float32, as within one process.
    parts = grad.to(compute_dtype(grad))
    if min(counts) < most:
        parts = torch.cat([_padded(piece, most) for piece in parts.split(counts)])
    out = parts.new_empty(most, *grad.shape[1:])
    scatter(out, parts.contiguous(), group=group)
    return out[: counts[dist.get_rank(group)]].to(grad.dtype)


def _padded(part, count):
    if part.shape[0] == count:
        return part.contiguous()
    return joined([part, part.new_zeros(count - part.shape[0], *part.shape[1:])])

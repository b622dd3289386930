"""Tensors of all ranks of a process group: their sum or least, and parts put together.

Registered operators take strings, so a group that was made known goes by its name.
"""

import torch
import torch.distributed as dist

from fastsim.groups import all_gather
from fastsim.operators import once_differentiable

_groups = {}  # by name


def know(group):
    """Lets the group be called by its name."""
    _groups[group.group_name] = group


def all_reduce_sum(value, name):
    """The sum of a tensor over the ranks of the group of that name."""
    return _all_reduce(value, dist.ReduceOp.SUM, name)


def all_reduce_min(value, name):
    """The minimum of a tensor over the ranks of the group of that name."""
    return _all_reduce(value, dist.ReduceOp.MIN, name)


def _all_reduce(value, operation, name):
    # Contiguous: memory is added up as it lies, which need not be the same on all ranks.
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, operation, _groups[name])
    return value


def merge_exponentials(top, exponentials, scale, name):
    """Maxima (of scores) and sums of exponentials relative to them, over the ranks."""
    both = -all_reduce_min(-top, name)
    return both, all_reduce_sum(exponentials * (scale * (top - both)).exp(), name)


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
    """(sum of counts, ...) from the ranks' parts, with a gradient; None stays None."""
    if part is None:
        return None
    return (
        _Gather.apply(part, counts, group)
        if part.requires_grad
        else gather_values(part, counts, group)
    )


class _Gather(torch.autograd.Function):
    """Parts of all ranks in their order; the gradient of a part is the sum over the ranks."""

    @staticmethod
    def forward(ctx, part, counts, group):
        ctx.counts, ctx.group = counts, group
        return gather_values(part, counts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.counts, ctx.group), None, None


def gather_values(part, counts, group):
    """As `gather`, without a gradient."""
    if part.dtype == torch.int16:  # which NCCL does not carry
        return gather_values(part.int(), counts, group).short()
    most = max(counts)
    out = part.new_empty(len(counts) * most, *part.shape[1:])
    all_gather(out, _padded(part.detach(), most), group)
    if min(counts) == most:
        return out
    return torch.cat([piece[:count] for piece, count in zip(out.split(most), counts, strict=True)])


def _reduce_scatter(grad, counts, group):
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    most = max(counts)
    # 16-bit gradients are added in float32, as within one process.
    parts = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if min(counts) < most:
        parts = torch.cat([_padded(piece, most) for piece in parts.split(counts)])
    out = parts.new_empty(most, *grad.shape[1:])
    scatter(out, parts.contiguous(), group=group)
    return out[: counts[dist.get_rank(group)]].to(grad.dtype)


def _padded(part, count):
    if part.shape[0] == count:
        return part.contiguous()
    return torch.cat([part, part.new_zeros(count - part.shape[0], *part.shape[1:])])

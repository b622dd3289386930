"""The features of all ranks, gathered with their gradient or without."""

import torch

from fastsim.operators import once_differentiable


def gather(features, rank, *, with_grad=True):
    """The features of all ranks (N of all, D); without their gradient, but for this rank's own."""
    if with_grad:
        return _Gather.apply(features)
    gathered = _all_gather(features.detach())
    gathered[rank] = features
    return torch.cat(gathered)


def _all_gather(features):
    """The features of each rank, as a list; all have as many rows."""
    parts = [torch.empty_like(features) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, features.contiguous())
    return parts


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        ctx.rows = features.shape[0]
        return torch.cat(_all_gather(features))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # A sum over all ranks rather than a scattered one, which not every transport has.
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad[torch.distributed.get_rank() * ctx.rows :][: ctx.rows]

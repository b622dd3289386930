"""The features of all ranks, gathered with their gradient or without."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.autocast import joined
from fastsim.operators import once_differentiable


class Sides(NamedTuple):
    """The images and texts (N, D) whose losses this rank computes, and their candidates (M, D).

    first: the row of `all_images` and `all_texts` at which those of this rank begin.
    """

    images: Tensor
    texts: Tensor
    all_images: Tensor
    all_texts: Tensor
    first: int = 0


def sides_of(loss, images, texts, *, with_grad):
    """The `Sides` of this rank's features, by the options of a ClipLoss."""
    if loss.world_size == 1:
        return Sides(images, texts, images, texts)
    all_images, all_texts = (
        gather(features, loss.rank, with_grad=with_grad) for features in (images, texts)
    )
    if not loss.local_loss:
        return Sides(all_images, all_texts, all_images, all_texts)
    return Sides(images, texts, all_images, all_texts, loss.rank * images.shape[0])


def gather(features, rank, *, with_grad=True):
    """The features of all ranks (M, D); without with_grad only this rank's have a gradient."""
    if with_grad:
        return _Gather.apply(features)
    gathered = _all_gather(features.detach())
    gathered[rank] = features
    return joined(gathered)


def _all_gather(features):
    """The features of each rank, as a list; every rank has the same number of rows."""
    parts = [torch.empty_like(features) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, features.contiguous())
    return parts


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        ctx.rows = features.shape[0]
        return joined(_all_gather(features))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # Not a reduce-scatter, which not every communication backend has.
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad[torch.distributed.get_rank() * ctx.rows :][: ctx.rows]

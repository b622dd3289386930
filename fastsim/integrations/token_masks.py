"""Tokens and their masks, as the late-interaction scores of several packages take them."""

import torch


def can_be_fused(sides, masks, dimensions):
    """Whether these are non-empty tensors of one floating dtype on one device, with their masks.

    sides: (queries, documents); dimensions: how many each has. A mask may be None. One of floats
    weights the tokens; other shapes a peer stretches, or refuses.
    """
    given = [*sides, *(mask for mask in masks if mask is not None)]
    if not all(isinstance(t, torch.Tensor) and t.device == given[0].device for t in given):
        return False
    if any(mask.is_floating_point() for mask in given[2:]):
        return False
    queries, documents = sides
    if queries.dtype != documents.dtype or not queries.is_floating_point():
        return False
    if (queries.dim(), documents.dim()) != dimensions or not all(t.numel() for t in sides):
        return False
    pairs = zip(sides, masks, strict=True)
    return all(mask is None or mask.shape == side.shape[:-1] for side, mask in pairs)


def weighted(queries, mask):
    """(queries, bool mask): integers other than 0 and 1 are weights of the tokens' scores."""
    if mask.dtype != torch.bool:
        queries = queries * mask[..., None].to(queries.dtype)
    return queries, mask.bool()

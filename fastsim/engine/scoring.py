"""Calls of a backend on a process that may have no rows or no columns.

A rank of a group may have none, for example at the end of an epoch. There are no scores then, and
the backend is not called.
"""

import torch

from fastsim.collectives import all_reduce_min


def state_of(tile, unit_x, unit_y, backend, **options):
    """`Backend.forward`: the state of the scores of unit_x (N, D) and unit_y (M, D)."""
    if not (len(unit_x) and len(unit_y)):
        return tile.empty_state(len(unit_x), len(unit_y), unit_x.device)
    return backend.forward(tile, unit_x, unit_y, **options)


def blocks_of(unit_x, unit_y, backend, **options):
    """`Backend.blocks` of the scores of unit_x and unit_y."""
    if not (len(unit_x) and len(unit_y)):
        return []
    return backend.blocks(len(unit_x), len(unit_y), unit_x.device, **options)


def common_loss_scale(tile, weights, dtype, columns, backend, group):
    """`Backend.loss_scale`, the smallest over the ranks of a group, whose gradients are added up.

    group: the name of the group, "" for one process.
    """
    some = weights is None or weights.numel() > 0
    # A rank without rows has no score gradient that could overflow.
    asked = weights if some else weights.new_zeros(1)
    loss_scale = backend.loss_scale(tile, asked, dtype, columns)
    if loss_scale is None or not group:
        return loss_scale
    return all_reduce_min(loss_scale if some else torch.full_like(loss_scale, torch.inf), group)


def scaled_coefficients(tile, state, weights, dtype, columns, backend, group):
    """(the coefficients of the losses times `weights` and a loss scale, that scale () or None).

    The scale follows from the coefficients. A bound without the state would be far too high for
    many scores, and small score gradients would be lost. Over a group it is the smallest of all
    ranks, whose gradients are added up.
    """
    found = tile.coefficients(state, weights)
    loss_scale = backend.loss_scale(tile, None, dtype, columns, found)
    if loss_scale is None:
        return found, None
    if group:
        loss_scale = all_reduce_min(loss_scale, group)
    return tile.record.scaled(found, loss_scale), loss_scale

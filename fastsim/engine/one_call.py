"""Losses that a backend computes in one call, loss and gradients, without a loop over panels."""

import contextlib

import torch

from fastsim.autocast import without_autocast
from fastsim.engine.call import products_needed


def one_call_serves(
    tile, rows, columns, width, self_similarity, dtype, weights, backend, *, with_metrics=False
):
    """Whether `Backend.in_one_call` computes this loss.

    rows, columns, width: N, M and D. self_similarity: whether x is compared with itself. dtype:
    that of the rows. weights: those of the losses; None asks for the losses themselves.
    with_metrics: whether a `fastsim.metrics` block is open.
    """
    if weights is None or tile.group or _panels_alone:
        return False
    if with_metrics and not backend.one_call_records_metrics:
        return False
    if isinstance(weights, torch.Tensor) and weights.ndim and not backend.one_call_weighs_rows:
        return False
    return backend.serves_one_call(tile, rows, columns, width, self_similarity, dtype)


def in_one_call(tile, x, y, scale, bias, weights, needs_grad, backend, totals=None, prefixes=None):
    """`Backend.in_one_call`, outside autocast. needs_grad: of x, y, scale and bias."""
    products = products_needed(needs_grad, y is None) if any(needs_grad) else None
    with without_autocast(x.device.type):
        return backend.in_one_call(tile, x, y, scale, bias, weights, products, totals, prefixes)


_panels_alone: list[bool] = []


@contextlib.contextmanager
def in_panels():
    """Within the block no loss takes one call: all go panel by panel, for checks of that code."""
    _panels_alone.append(True)
    try:
        yield
    finally:
        _panels_alone.pop()


def panels_alone():
    """Whether an `in_panels` block is open."""
    return bool(_panels_alone)

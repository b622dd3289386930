"""Losses that a backend makes in one call of its own: of a small batch, or band by band."""

import contextlib

import torch

from fastsim.autocast import without_autocast
from fastsim.engine.call import products_wanted
from fastsim.operators import traced


def takes_whole(tile, rows, columns, width, together, dtype, weights, backend, *, observed=False):
    """Whether one call of the backend does it all: loss, gradients, everything between.

    together: of rows with themselves. dtype: of the rows. weights: of the losses, None for the
    losses themselves. observed: whether `fastsim.metrics` sees the scores.
    """
    if weights is None or tile.group or _panels_alone:
        return False
    if observed and not backend.observes_whole:
        return False
    if isinstance(weights, torch.Tensor) and weights.ndim and not backend.weighs_whole:
        return False
    return backend.serves_whole(tile, rows, columns, width, together, dtype)


def is_whole(tile, x, y, weights, backend, *, observed=False):
    """Whether one call of the backend makes the loss, with its gradients: no operator is needed.

    Of a small batch the operator's arguments would take longer than the loss.
    """
    if traced():
        return False
    (rows, width), columns = x.shape, (x if y is None else y).shape[0]
    sizes = rows, columns, width, y is None, x.dtype
    return takes_whole(tile, *sizes, weights, backend, observed=observed)


def in_one_call(tile, x, y, scale, bias, weights, wants, backend, totals=None, prefixes=None):
    """What `Backend.whole` returns of a loss that `is_whole`."""
    products = products_wanted(wants, y is None) if any(wants) else None
    with without_autocast(x.device.type):
        return backend.whole(tile, x, y, scale, bias, weights, products, totals, prefixes)


_panels_alone: list[bool] = []


@contextlib.contextmanager
def in_panels():
    """Within the block no loss of this process is made in one call, for checks of what else is."""
    _panels_alone.append(True)
    try:
        yield
    finally:
        _panels_alone.pop()


def panels_alone():
    """Whether a block of `in_panels` is open."""
    return bool(_panels_alone)

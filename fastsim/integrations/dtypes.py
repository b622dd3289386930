"""The dtype in which a peer returns its loss, asked of the peer itself on a few rows.

Ours are computed in float32 and more; what a trainer gets back has the dtype that it had before.
Which that is depends on the peer's operations, on autocast's lists and on the torch at hand. So it
does whether a peer takes columns of several dtypes; ours takes them always.
"""

import functools

import torch
from torch import Tensor

_known = {}
_WIDE = {torch.float32, torch.float64}


def in_one_dtype(*columns):
    """The columns in the floating dtype that all of them promote to."""
    dtypes = {column.dtype for column in columns}
    if len(dtypes) == 1 or not all(dtype.is_floating_point for dtype in dtypes):
        return list(columns)
    wide = functools.reduce(torch.promote_types, dtypes)
    return [column.to(wide) for column in columns]


def as_theirs(loss, owner, call, *given):
    """`loss` in the dtype of call(), theirs on a few rows; where that raises, as it is.

    owner: what names the computation; kept with the dtypes of `given`, what the loss is made of,
    for the next time.
    """
    tensors = [value for value in given if isinstance(value, Tensor)]
    device = loss.device.type
    autocast = torch.is_autocast_enabled(device)
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if not autocast and len(dtypes) < 2 and dtypes <= _WIDE:
        return loss
    key = owner, device, autocast and torch.get_autocast_dtype(device)
    key += tuple((t.dtype, t.dim()) for t in tensors)
    if key not in _known:
        with torch.no_grad():
            try:
                _known[key] = call().dtype
            except Exception:  # a mixture of dtypes, or a user's function that wants more rows
                _known[key] = loss.dtype
    return loss.to(_known[key])


def code_of(called):
    """What tells a callable from others and can be kept: it may hold a model, as a method does."""
    while isinstance(called, functools.partial):
        called = called.func
    function = getattr(called, "__func__", called)
    code = getattr(function, "__code__", None) or getattr(function, "__qualname__", None)
    return code or type(called)

"""The dtype in which a peer returns its loss, found by running the peer on a few rows.

Fused losses are computed in float32 or more, but a trainer has to get the dtype of before. That
depends on the peer's operations, on autocast and on the version of torch. Unlike some peers, fused
losses accept columns of several dtypes.
"""

import functools

import torch
from torch import Tensor

_known = {}  # (owner, device, dtypes) -> dtype of the peer's loss
_WIDE = {torch.float32, torch.float64}


def in_one_dtype(*columns):
    """The columns in their common promoted floating dtype."""
    dtypes = {column.dtype for column in columns}
    if len(dtypes) == 1 or not all(dtype.is_floating_point for dtype in dtypes):
        return list(columns)
    wide = functools.reduce(torch.promote_types, dtypes)
    return [column.to(wide) for column in columns]


def in_their_dtype(loss, owner, call, *inputs):
    """`loss` in the dtype of call(), the peer's loss of a few rows; unchanged if that raises.

    owner: a hashable name of the computation. The dtype is remembered per owner and dtypes of
    `inputs`, each at its place, so that the peer runs once for each.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    device = loss.device.type
    autocast = torch.is_autocast_enabled(device)
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if not autocast and len(dtypes) < 2 and dtypes <= _WIDE:
        return loss
    key = owner, device, autocast and torch.get_autocast_dtype(device)
    key += tuple((v.dtype, v.dim()) if isinstance(v, Tensor) else None for v in inputs)
    if key not in _known:
        with torch.no_grad():
            try:
                _known[key] = call().dtype
            except Exception:  # a mixture of dtypes, or a user's function that needs more rows
                _known[key] = loss.dtype
    return loss.to(_known[key])


def function_key(function):
    """A key that identifies a callable without keeping alive the objects that it holds."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None) or getattr(plain, "__qualname__", None)
    return code or type(function)

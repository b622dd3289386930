"""Unit rows and their gradient in plain torch, a band of rows at a time."""

import torch

from fastsim.precision import inverse_norms, wide_dtype

BAND = 1 << 21  # numbers of a band: its temporaries in double precision stay small


def bands(x):
    """Slices of rows of x (N, D)."""
    count, width = x.shape
    tall = max(1, BAND // width)
    return [slice(top, min(count, top + tall)) for top in range(0, count, tall)]


def unit_rows(x, dtype):
    """(x / |x| in `dtype`, 1 / |x| in the compute type); a zero row stays zero, its inverse 0."""
    compute = torch.promote_types(x.dtype, torch.float32)
    unit, inverse = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=compute)
    for rows in bands(x):
        part = x[rows].to(compute)
        inverse[rows] = inverse_norms(part)
        torch.mul(part, inverse[rows, None], out=unit[rows])
    return unit, inverse


def unit_rows_backward(grad_unit, x, inverse, factor, dtype):
    """(factor r (g - (u . g) u) in `dtype`, u . g (N,)) for u = r x and g = dL/du."""
    grad, dots = x.new_empty(x.shape, dtype=dtype), torch.empty_like(inverse)
    wide = wide_dtype(x.device)
    for rows in bands(x):
        part, above, r = x[rows].to(inverse.dtype), grad_unit[rows], inverse[rows]
        along = torch.linalg.vecdot(part.to(wide), above.to(wide)) * r
        dots[rows] = along
        pull = torch.addcmul(above, part, (dots[rows] * r)[:, None], value=-1)
        torch.mul(pull, (factor * r)[:, None], out=grad[rows])
    return grad, dots

"""Unit rows and their gradient in plain torch, a band of rows at a time."""

import torch

from fastsim.backends.torch.panels import state_dtype

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
        inverse[rows] = _inverse_norms(part)
        torch.mul(part, inverse[rows, None], out=unit[rows])
    return unit, inverse


def unit_rows_backward(grad_unit, x, inverse, factor, dtype):
    """(factor r (g - (u . g) u) in `dtype`, u . g (N,)) for u = r x and g = dL/du."""
    grad, dots = x.new_empty(x.shape, dtype=dtype), torch.empty_like(inverse)
    wide = state_dtype(x.device)
    for rows in bands(x):
        part, above, r = x[rows].to(inverse.dtype), grad_unit[rows], inverse[rows]
        along = torch.linalg.vecdot(part.to(wide), above.to(wide)) * r
        dots[rows] = along
        pull = torch.addcmul(above, part, (dots[rows] * r)[:, None], value=-1)
        torch.mul(pull, (factor * r)[:, None], out=grad[rows])
    return grad, dots


def _inverse_norms(x):
    """1 / |x| by rows, 0 where the norm is below the smallest normal number."""
    tiny = torch.finfo(x.dtype).tiny
    if state_dtype(x.device) == torch.float64:
        norm = torch.linalg.vector_norm(x.double(), dim=1)
        return torch.where(norm < tiny, 0.0, 1 / norm)
    # The squares of float32 numbers pass its range: the largest is taken out first.
    largest = x.abs().amax(1)
    size = torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(x / size[:, None], dim=1)
    return torch.where(largest < tiny, 0.0, 1 / norm / size)

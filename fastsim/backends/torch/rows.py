"""Unit rows and their gradient in plain torch, a band of rows at a time."""

import torch

from fastsim.backends.bands import bands
from fastsim.precision import compute_dtype, inverse_norms, wide_dtype


def unit_rows(x, dtype):
    """(x / |x| in `dtype`, 1 / |x| in the compute type); a zero row gives zeros and 0."""
    parts = bands(x)
    if len(parts) == 1:  # for a small batch the calls take longer than the work
        return _unit(x, dtype)
    compute = compute_dtype(x)
    unit, inverse = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=compute)
    for rows in parts:
        _, inverse[rows] = _unit(x[rows], dtype, unit[rows])
    return unit, inverse


def unit_rows_backward(grad_unit, x, inverse, factor, dtype):
    """(factor r (g - (u . g) u) in `dtype`, u . g (N,)) for u = r x and g = dL/du."""
    parts = bands(x)
    if len(parts) == 1:
        return _backward(grad_unit, x, inverse, factor, dtype)
    grad, dots = x.new_empty(x.shape, dtype=dtype), torch.empty_like(inverse)
    for rows in parts:
        band = grad_unit[rows], x[rows], inverse[rows]
        _, dots[rows] = _backward(*band, factor, dtype, grad[rows])
    return grad, dots


def _unit(x, dtype, out=None):
    compute = compute_dtype(x)
    inverse = inverse_norms(x).to(compute)
    if out is None and dtype != compute:
        out = x.new_empty(x.shape, dtype=dtype)
    return torch.mul(x, inverse[:, None], out=out), inverse


def _backward(grad_unit, x, inverse, factor, dtype, out=None):
    unit = x * inverse[:, None]
    dots = (unit * grad_unit).sum(1, dtype=wide_dtype(x.device)).to(inverse.dtype)
    pull = torch.addcmul(grad_unit, unit, dots[:, None], value=-1, out=unit)
    if out is None:
        out = pull if pull.dtype == dtype else pull.new_empty(pull.shape, dtype=dtype)
    return torch.mul(pull, (factor * inverse)[:, None], out=out), dots

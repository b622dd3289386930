"""MaxSim by the C++ kernels: a document and a share of the query tokens at a time."""

import torch

from fastsim.backends.cpu import amx


def max_sim(x, y, cosine, own, scores, places):
    """`Backend.max_sim`."""
    sides = [_rows(side) for side in (x, y)]
    arguments = *sides, x.starts(), y.starts(), _mask(x), _mask(y), cosine, own
    operator = torch.ops.fastsim_cpu.max_sim
    parts = amx.parts(x.rows.dtype)
    if not operator(*arguments, parts, scores, places):
        # An infinity has no parts of bfloat16 whose products add up to what it gives.
        operator(*arguments, 0, scores, places)


def max_sim_backward(grad, places, x, y, cosine, own, wants):
    """`Backend.max_sim_backward`."""
    sides = [_rows(side) for side in (x, y)]
    grads = [torch.empty_like(s) if want else None for s, want in zip(sides, wants, strict=True)]
    starts, masks = (x.starts(), y.starts()), (_mask(x), _mask(y))
    arguments = grad, places, *sides, *starts, *masks, cosine, own
    torch.ops.fastsim_cpu.max_sim_backward(*arguments, *grads)
    return grads


def _rows(side):
    return side.rows.contiguous()


def _mask(side):
    return None if side.mask is None else side.mask.contiguous()

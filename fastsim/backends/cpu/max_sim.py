"""MaxSim by the C++ kernels, one document and a part of the query tokens at a time."""

import torch

from fastsim.backends.cpu import amx


def max_sim(x, y, cosine, own_documents, scores, places):
    """`Backend.max_sim`."""
    sides = [_rows(side) for side in (x, y)]
    arguments = *sides, x.starts(), y.starts(), _mask(x), _mask(y), cosine, own_documents
    operator = torch.ops.fastsim_cpu.max_sim
    parts = amx.parts(x.rows.dtype)
    if not operator(*arguments, parts, scores, places):
        # An entry is not finite: the products of its parts do not add up to the right result.
        operator(*arguments, 0, scores, places)


def max_sim_backward(grad, places, x, y, cosine, own_documents, needs_grad):
    """`Backend.max_sim_backward`."""
    sides = [_rows(side) for side in (x, y)]
    grads = [
        torch.empty_like(rows) if want else None
        for rows, want in zip(sides, needs_grad, strict=True)
    ]
    starts, masks = (x.starts(), y.starts()), (_mask(x), _mask(y))
    arguments = grad, places, *sides, *starts, *masks, cosine, own_documents
    torch.ops.fastsim_cpu.max_sim_backward(*arguments, *grads)
    return grads


def _rows(side):
    return side.rows.contiguous()


def _mask(side):
    return None if side.mask is None else side.mask.contiguous()

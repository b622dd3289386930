"""InfoNCE of a small batch with further candidates or label smoothing, in one call."""

from dataclasses import replace

import torch

from fastsim.autocast import without_autocast
from fastsim.backends.cpu import amx, amx_loss
from fastsim.backends.cpu.sizes import are_two_panels
from fastsim.backends.cpu.whole import (
    SMALL_OF_ONE_PART,
    by_blas,
    is_large_for_parts,
    like,
    numbers_of,
    of_parts,
)
from fastsim.pairs import Pairs
from fastsim.tile import Tile


class InOneSoftmax:
    """The part of `CpuBackend` that holds a row against several sets of candidates at once."""

    def serves_further(self, rows, columns, width, dtype):
        shape = rows, columns, width
        by_unit = amx.is_matrix_unit() and of_parts(*shape, dtype, SMALL_OF_ONE_PART)
        return are_two_panels(rows, columns) and not (by_unit or by_blas(*shape, dtype))

    def further(self, sides, directions, numbers, cosine, weights, wants, totals):
        dtype = torch.float64 if sides[0].dtype == torch.float64 else torch.float32
        x, y, own, references = sides
        scale, margin, smoothing = numbers
        if own is None and not any(directions) and totals is None and weights is not None:
            found = _by_one_matrix(self, sides, numbers, cosine, weights, wants[:2])
            if found is not None:
                return found
        own = None if own is None else own.flatten(0, 1)
        alike = not isinstance(weights, torch.Tensor)
        loss = x.new_empty(() if weights is not None else x.shape[0], dtype=dtype)
        grads = [
            like(side, want, dtype) if want else None
            for side, want in zip((x, y, own), wants, strict=True)
        ]
        torch.ops.fastsim_cpu.further.default(
            x,
            y,
            own,
            references,
            *directions,
            *numbers_of(dtype, scale),
            margin,
            smoothing,
            cosine,
            None if alike else weights,
            (weights or 0.0) if alike else 0.0,
            *grads,
            loss,
            totals,
        )
        if grads[2] is not None:
            grads[2] = grads[2].view(sides[2].shape)
        return loss, grads


def _by_one_matrix(backend, sides, numbers, cosine, weights, wants):
    """Loss and gradients by products of bfloat16 parts, as of a single matrix of scores; None where
    these serve no such loss.

    References are more columns. With label smoothing every candidate is a target, a row's own more
    than the others.
    """
    x, y, _, references = sides
    scale, margin, smoothing = numbers
    rows, candidates = x.shape[0], y.shape[0]
    columns = candidates + (0 if references is None else references.shape[0])
    if not is_large_for_parts(rows, columns, x.shape[1], x.dtype):
        return None
    pairs = Pairs(torch.arange(rows))
    if smoothing:
        share = smoothing / candidates
        groups = {"row_groups": torch.arange(rows), "column_groups": torch.arange(candidates)}
        pairs = replace(pairs, **groups, negative_target=share / (1 - smoothing + share))
    tile = Tile("softmax", pairs, margin=margin, normalise=smoothing != 0, cosine=cosine)
    if not amx_loss.serves(tile, columns, x.dtype):
        return None
    if references is not None:
        with without_autocast("cpu"):  # which refuses to concatenate 16-bit rows not its own
            y = torch.cat([y, references])
    loss, *grads = backend.whole(tile, x, y, scale, 0.0, weights, wants)
    grads = (grad[:count] for grad, count in zip(grads, (rows, candidates), strict=False))
    return loss, [*(grad if want else None for grad, want in zip(grads, wants, strict=True)), None]

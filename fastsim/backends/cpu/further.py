"""InfoNCE with further candidates or label smoothing, in one call."""

from dataclasses import replace

import torch

from fastsim.autocast import without_autocast
from fastsim.backends.cpu import amx, amx_loss
from fastsim.backends.cpu.one_call import (
    SMALL_OF_ONE_PART,
    as_numbers,
    blas_is_faster,
    gradient_memory,
    parts_are_faster,
    parts_pay_in_one_call,
)
from fastsim.backends.cpu.sizes import WIDEST, are_two_panels, band_rows
from fastsim.pairs import Pairs
from fastsim.precision import compute_dtype
from fastsim.tile_loss import TileLoss

# References for each candidate, up to which one matrix with products of all parts is the fastest
# way. It computes a gradient of the references too, which nobody wants.
MOST_REFERENCES = 4


class InOneSoftmax:
    """The part of `CpuBackend` for a softmax over several sets of candidates."""

    def serves_further(self, rows, columns, width, dtype, directions):
        if blas_is_faster(rows, columns, width, dtype):
            return False
        if are_two_panels(rows, columns):
            return True
        in_parts = parts_are_faster(rows, columns, width, dtype, SMALL_OF_ONE_PART)
        return not any(directions) and columns <= WIDEST and not in_parts

    def further(self, sides, directions, numbers, cosine, weights, needs_grad, totals):
        dtype = compute_dtype(sides[0])
        x, y, negatives, references = sides
        scale, margin, smoothing = numbers
        if negatives is None and not any(directions) and totals is None and weights is not None:
            result = _by_one_matrix(self, sides, numbers, cosine, weights, needs_grad[:2])
            if result is not None:
                return result
        tall = max(x.shape[0], 1) if any(directions) else _band_rows(*sides)
        negatives = None if negatives is None else negatives.flatten(0, 1)
        one_weight = not isinstance(weights, torch.Tensor)
        loss = x.new_empty(() if weights is not None else x.shape[0], dtype=dtype)
        grads = [
            gradient_memory(side, want, dtype) if want else None
            for side, want in zip((x, y, negatives), needs_grad, strict=True)
        ]
        torch.ops.fastsim_cpu.further.default(
            x,
            y,
            negatives,
            references,
            *directions,
            *as_numbers(dtype, scale),
            margin,
            smoothing,
            cosine,
            None if one_weight else weights,
            (weights or 0.0) if one_weight else 0.0,
            tall,
            *grads,
            loss,
            totals,
        )
        if grads[2] is not None:
            grads[2] = grads[2].view(sides[2].shape)
        return loss, grads


def _band_rows(x, y, negatives, references):
    """The rows of a band, which has the scores of its rows and the unit rows of their negatives."""
    numbers = y.shape[0]
    numbers += 0 if references is None else references.shape[0]
    numbers += 0 if negatives is None else negatives.shape[1] * negatives.shape[2]
    return band_rows(x.shape[0], numbers)


def _by_one_matrix(backend, sides, numbers, cosine, weights, needs_grad):
    """(loss, gradients) from one matrix of scores, by products of bfloat16 parts; None if such
    products do not serve this loss.

    References become further columns. With label smoothing every candidate has a target; that of
    the positive is the largest.
    """
    x, y, _, references = sides
    scale, margin, smoothing = numbers
    rows, candidates = x.shape[0], y.shape[0]
    columns = candidates + (0 if references is None else references.shape[0])
    if not parts_pay_in_one_call(rows, columns, x.shape[1], x.dtype):
        return None
    if columns > (1 + MOST_REFERENCES) * candidates and amx.parts(x.dtype) == amx.ALL_PARTS:
        return None
    pairs = Pairs(torch.arange(rows))
    if smoothing:
        share = smoothing / candidates
        groups = {"row_groups": torch.arange(rows), "column_groups": torch.arange(candidates)}
        pairs = replace(pairs, **groups, negative_target=share / (1 - smoothing + share))
    tile = TileLoss("softmax", pairs, margin=margin, normalise=smoothing != 0, cosine=cosine)
    if not amx_loss.serves(tile, columns, x.dtype):
        return None
    if references is not None:
        with without_autocast("cpu"):  # autocast cannot concatenate rows of the other 16-bit type
            y = torch.cat([y, references])
    loss, *grads = backend.in_one_call(tile, x, y, scale, 0.0, weights, needs_grad)
    grads = (grad[:count] for grad, count in zip(grads, (rows, candidates), strict=False))
    return loss, [
        *(grad if want else None for grad, want in zip(grads, needs_grad, strict=True)),
        None,
    ]

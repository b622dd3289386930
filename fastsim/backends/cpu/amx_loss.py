"""A loss of many rows and its gradients in one call, by products of bfloat16 operands."""

import torch

from fastsim.backends.cpu import amx, triplet

BLOCK_KINDS = ("softmax", "sigmoid", "squared_error")  # kinds that need no whole rows
# Columns packed at a time, twice as many if operands have one part: 38 MB at width 384 in float32.
# A kind that needs whole rows is served only up to this many columns. Its scores then take 8 MB for
# each thread (16 MB with one part); reading them back is cheaper than computing them again.
STRIPE = 8192
# The most bytes that packed columns and kept scores take together. A loss of rows and columns keeps
# the scores of as many rows as fit from its first pass to its second: all of 4,096 x 4,096 beside
# float32 columns of width 384.
KEPT = 88 << 20


def serves(tile, columns, dtype):
    """Whether `loss` can compute this loss over this many columns."""
    pairs, parts = tile.pairs, amx.parts(dtype)
    # The products of the parts of an infinite float32 do not add up to the right result. That does
    # not matter for cosines, which are then NaN in any case, nor for dot products of 16-bit rows,
    # which may become NaN too.
    exact = tile.cosine or dtype.itemsize == 2
    if not (exact and parts) or tile.kind in triplet.KINDS or pairs.skip != "nothing":
        return False
    options = (pairs.guide, pairs.factors, pairs.exclude_above, pairs.column_bias, pairs.row_shift)
    if tile.kind in BLOCK_KINDS and all(option is None for option in options):
        return True
    return tile.rows_alone and columns <= _stripe(parts)


def loss(tile, x, y, arguments, results):
    """Writes the loss, and the gradients that are not None.

    x, y, and the rows of a guide and of factors have stride 1 along a row.
    arguments: the arguments of the operator after x and y (csrc/cpu/one_call_arguments.h).
    results: the tensors to write.
    """
    guide, factors, parts = tile.pairs.guide, tile.pairs.factors, amx.parts(x.dtype)
    torch.ops.fastsim_cpu.amx_loss.default(
        x,
        y,
        *arguments,
        parts,
        amx.score_grad_parts(x.dtype),
        0 if guide is None else amx.parts(guide.rows.dtype),
        amx.parts(factors.rows.dtype) if factors and factors.cosine else 0,
        _stripe(parts),
        KEPT,
        *results,
    )


def _stripe(parts):
    return STRIPE * (2 if parts == 1 else 1)

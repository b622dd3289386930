"""A loss of many rows by products of bfloat16 operands, with its gradient, in one call."""

import torch

from fastsim.backends.cpu import amx, triplet

OF_BLOCKS = ("softmax", "sigmoid", "squared_error")  # kinds that need no whole rows
# Columns that are operands at a time, of one part twice as many: 38 MB at width 384 in float32.
# Scores of whole rows, which no more columns have, take 8 MB a thread, of one part 16; to read them
# back costs less than to make them again.
STRIPE = 8192
# Bytes that these operands may take together with scores that a loss of rows and columns keeps from
# its first look at them to the second: of as many rows as there is room for.
KEPT = 72 << 20


def serves(tile, columns, dtype):
    """Whether `loss` serves one of so many columns."""
    pairs, parts = tile.pairs, amx.parts(dtype)
    # An infinity in float32 has no parts whose products add up to what it gives. A cosine of it is
    # NaN in any case; a dot product of 16-bit rows may be NaN too.
    exact = tile.cosine or dtype.itemsize == 2
    if not (exact and parts) or tile.kind in triplet.KINDS or pairs.skip != "nothing":
        return False
    moved = (pairs.guide, pairs.factors, pairs.exclude_above, pairs.column_bias, pairs.row_shift)
    if tile.kind in OF_BLOCKS and all(value is None for value in moved):
        return True
    return tile.rows_alone and columns <= _stripe(parts)


def loss(tile, x, y, given, results):
    """Writes the loss, and the gradients that are not None.

    All rows with their numbers side by side. given: what comes after x and y; results: where it is
    written (csrc/cpu/whole_arguments.h).
    """
    guide, factors, parts = tile.pairs.guide, tile.pairs.factors, amx.parts(x.dtype)
    torch.ops.fastsim_cpu.amx_loss.default(
        x,
        y,
        *given,
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

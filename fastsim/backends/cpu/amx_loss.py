"""A loss of many rows by products of bfloat16 operands, with its gradient, in one call."""

import torch

from fastsim.backends.cpu import amx

KINDS = ("softmax", "sigmoid", "squared_error")
# Columns that are operands at a time, of one part twice as many: 38 MB at width 384 in float32.
# Scores of whole rows, which no more columns have, take 8 MB a thread, of one part 16; to read them
# back costs less than to make them again.
STRIPE = 8192
# Bytes that these operands may take together with scores that a loss of rows and columns keeps from
# its first look at them to the second: of as many rows as there is room for.
KEPT = 72 << 20


def serves(tile, dtype):
    """Whether `loss` serves one."""
    pairs = tile.pairs
    more = (pairs.guide, pairs.factors, pairs.exclude_above, pairs.column_bias, pairs.row_shift)
    plain = pairs.skip == "nothing" and all(value is None for value in more)
    # An infinity in float32 has no parts whose products add up to what it gives. A cosine of it is
    # NaN in any case; a dot product of 16-bit rows may be NaN too.
    rows = tile.cosine or dtype.itemsize == 2
    return tile.kind in KINDS and rows and plain and dtype != torch.float64


def loss(tile, x, y, numbers, weights, weight, grads, total, parameters, totals):
    """Writes the loss, and the gradients that are not None; numbers: scale and bias."""
    pairs, parts = tile.pairs, amx.parts(x.dtype)
    torch.ops.fastsim_cpu.amx_loss.default(
        *map(amx.side_by_side, (x, y)),
        *pairs.tensors(),
        pairs.negative_target,
        pairs.skip,
        tile.seen,
        tile.kind,
        *numbers,
        tile.margin,
        tile.normalise,
        tile.symmetric,
        tile.cosine,
        tile.positive_weights,
        weights,
        weight,
        parts,
        amx.score_grad_parts(x.dtype),
        STRIPE * (2 if parts == 1 else 1),
        KEPT,
        *grads,
        total,
        parameters,
        totals,
    )

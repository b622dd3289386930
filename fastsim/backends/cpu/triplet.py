"""The full triplet loss of a batch that is not small: one product of all scores, in one call."""

import torch

from fastsim.backends.cpu import amx, sizes

KINDS = ("hard_triplet", "semi-hard_triplet")


def is_large(tile, rows, columns, width):
    """Whether a loss is a triplet loss of so many scores that products with their gradients, which
    but for one or two in a row are alike, cost more than the calls that avoid them.
    """
    return tile.kind in KINDS and rows * columns * width > sizes.CHEAP


def serves(tile):
    """Whether `full_triplet` serves one."""
    pairs = tile.pairs
    moved = (pairs.row_ids, pairs.guide, pairs.exclude_above, pairs.column_bias, pairs.row_shift)
    return tile.cosine and pairs.skip == "nothing" and all(value is None for value in moved)


def full_triplet(tile, x, y, parts, weights, weight, grad_x, grad_y, loss, totals):
    """Writes the loss, and the gradients that are not None.

    parts: of bfloat16, of the products that make the scores; 0 for products of float32 numbers.
    """
    if parts:
        x, y = map(amx.side_by_side, (x, y))
    torch.ops.fastsim_cpu.full_triplet.default(
        x,
        y,
        tile.pairs.positives,
        tile.seen,
        tile.kind == "semi-hard_triplet",
        tile.margin,
        parts,
        weights,
        weight,
        grad_x,
        grad_y,
        loss,
        totals,
    )

"""The full triplet loss of a large batch in one call, with one product of all scores."""

import torch

from fastsim.backends.cpu import amx, sizes

KINDS = ("hard_triplet", "semi-hard_triplet")


def is_large(tile, rows, columns, width):
    """Whether the loss is a triplet loss of more than `sizes.CHEAP` multiply-adds.

    All but one or two score gradients of a row are equal. For so many multiply-adds, products with
    score gradients cost more than the calls that avoid them.
    """
    return tile.kind in KINDS and rows * columns * width > sizes.CHEAP


def serves(tile):
    """Whether `full_triplet` can compute this triplet loss."""
    pairs = tile.pairs
    options = (pairs.row_ids, pairs.guide, pairs.exclude_above, pairs.column_bias, pairs.row_shift)
    return tile.cosine and pairs.skip == "nothing" and all(option is None for option in options)


def full_triplet(tile, x, y, parts, weights, weight, grad_x, grad_y, loss, totals):
    """Writes the loss, and the gradients that are not None.

    parts: the number of bfloat16 parts of the operands whose product is the scores; 0 for a product
        in float32.
    weights: (N,) weights of the rows; None means `weight` for every row.
    """
    if parts:
        x, y = map(amx.with_unit_stride, (x, y))
    torch.ops.fastsim_cpu.full_triplet.default(
        x,
        y,
        tile.pairs.positives,
        tile.row_metrics,
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

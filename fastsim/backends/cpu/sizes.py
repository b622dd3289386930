"""The sizes of the blocks of the CPU backend, and the number of rows whose scores it keeps."""

from fastsim.backends.panel import panel_bytes

PANEL = 4 << 20  # scores of a panel: 16 MB in float32, which fits into a last-level cache
# Scores of the panel of a band in one call: 32 MB. Of 16,384 columns it has 504 rows, and a loss is
# 2 % faster than with 252, as its products pack less and add to the gradient of y less often.
BAND = 8 << 20
# The most scores that a forward pass keeps for the score gradients: 32 MB in float32. Reading them
# back is cheaper than computing them again, even from main memory. So memory alone sets the bound:
# a loss that keeps scores takes no more than others at 16,384 x 384, where gradients outweigh
# panels.
KEPT = 8 << 20
# The most scores that a sweep over prefixes keeps for all widths together: 24 MB. The products of a
# sweep stay in cache, so computing them again costs little more than fresh memory to keep them.
KEPT_IN_SWEEP = 6 << 20
WORTH_KEEPING = 16  # keeping fewer than 1/16 of the rows saves less than 2 % of the products
ONCE = 4  # a panel is smaller by this factor if its scores are read once and not multiplied
SWEEP = 4  # each panel of a sweep over prefixes, one for each width, is smaller by this factor
CHEAP = 1 << 24  # a product of up to this many multiply-adds costs less than the calls it saves
FEWEST_ROWS, MOST_ROWS = 120, 1008  # of a block: fewer slow the products down, more gain nothing
TILE_ROWS = 12  # the rows of a panel are a multiple of it: whole register tiles for two threads
PAIRED = 256  # rows and columns of a block of which only the diagonal is needed
MOST_BAND_ROWS = 504  # in one call, where a further block adds no cost but its products
ALIGNED = 64  # a block begins at a multiple of it, as do the column panels of all kernels
WIDEST = 1 << 17  # the most columns of a block: 120 rows of them take 63 MB


def scores_of_a_panel(default=None):
    """The number of scores in a panel, if FASTSIM_PANEL_MB does not set it: `default` or PANEL."""
    return panel_bytes(4 * (default or PANEL)) // 4


def block_shape(rows, columns, whole_rows, panels=1):
    """(rows, columns) of a block. panels: the number of panels that are in memory at once."""
    if 0 in (rows, columns):  # a rank of a group may have none
        return TILE_ROWS, ALIGNED
    wide = columns if whole_rows else min(columns, WIDEST)
    return _block_rows(rows, wide, scores_of_a_panel() // panels, MOST_ROWS), wide


def _block_rows(rows, wide, scores, most):
    """The rows of a block of `scores` scores with `wide` columns, at most `most`."""
    tall = min(most, max(FEWEST_ROWS, scores // max(1, wide) // TILE_ROWS * TILE_ROWS))
    # Blocks of equal height: a last block of few rows would slow its product down.
    even = -(-rows // -(-rows // tall))
    return min(rows, -(-even // TILE_ROWS) * TILE_ROWS)


def is_one_block(rows, columns):
    """Whether all scores are one block."""
    fits = rows <= FEWEST_ROWS or rows <= block_shape(rows, columns, True)[0]
    return fits and columns <= WIDEST


def are_two_panels(rows, columns):
    """Whether all scores fit into two panels."""
    return rows * columns <= 2 * scores_of_a_panel()


def band_rows(rows, columns, panels=1):
    """The rows of a band in one call: all rows if they are one block.

    panels: as in `block_shape`.
    """
    if is_one_block(rows, columns):
        return max(rows, 1)
    return _block_rows(rows, columns, scores_of_a_panel(BAND) // panels, MOST_BAND_ROWS)


def rows_kept(rows, shape, most=None):
    """The number of rows whose scores a forward pass keeps: all, or those of whole blocks.

    shape: (rows, columns) of a block. most: the most scores to keep; None means KEPT.
    """
    tall, wide = shape
    fitting = (KEPT if most is None else most) // wide
    if fitting >= rows:
        return rows
    return fitting // tall * tall if fitting * WORTH_KEEPING >= rows else 0

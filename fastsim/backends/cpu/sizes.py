"""How many scores a block of the CPU backend holds, and of how many rows they are kept."""

from fastsim.backends.panel import panel_bytes

PANEL = 4 << 20  # scores: 16 MB in float32, which a last-level cache holds
# Scores that a forward pass leaves for the score gradients: 32 MB in float32. To read them
# back is cheaper than to make them again, in a cache or not. So memory alone bounds them: no more
# than other losses take at 16,384 x 384, where gradients outweigh panels.
KEPT = 8 << 20
# The same of a sweep over prefixes, of all widths: 24 MB. Its products stay near the processor, so
# that to make them again costs little more than fresh memory to keep them.
KEPT_IN_SWEEP = 6 << 20
WORTH_KEEPING = 16  # to keep less than one row in so many saves less than 2 % of the products
ONCE = 4  # by which a panel is smaller whose scores are looked at once and multiply nothing
SWEEP = 4  # by which each panel of a sweep over prefixes, one a width, is smaller
CHEAP = 1 << 24  # multiply-adds of a product that cost less than the calls it saves
FEWEST_ROWS, MOST_ROWS = 120, 1008  # fewer starve the products, more gain nothing
TILE_ROWS = 12  # rows of a panel are a multiple: whole register tiles for two threads
PAIRED = 256  # rows and columns of a block of which the diagonal is wanted
MOST_BAND_ROWS = 504  # in one call, where more blocks cost nothing but their products
ALIGNED = 64  # a block's first column is a multiple of every kernel's column panel
WIDEST = 1 << 17  # columns of a block: 120 rows of them take 63 MB


def scores_of_a_panel():
    return panel_bytes(4 * PANEL) // 4


def block_shape(rows, columns, whole_rows, panels=1, most=MOST_ROWS):
    """(rows, columns) of a block where `panels` of its size are alive at once; most: rows."""
    if 0 in (rows, columns):  # one rank of a group may have none
        return TILE_ROWS, ALIGNED
    wide = columns if whole_rows else min(columns, WIDEST)
    tall = scores_of_a_panel() // panels // wide // TILE_ROWS * TILE_ROWS
    tall = min(most, max(FEWEST_ROWS, tall))
    # Blocks of one height: a last one of few rows would starve its products.
    even = -(-rows // -(-rows // tall))
    return min(rows, -(-even // TILE_ROWS) * TILE_ROWS), wide


def is_one_block(rows, columns):
    fits = rows <= FEWEST_ROWS or rows <= block_shape(rows, columns, True)[0]
    return fits and columns <= WIDEST


def are_two_panels(rows, columns):
    """Whether all scores fit into two panels: what a large batch with a guide has in memory."""
    return rows * columns <= 2 * scores_of_a_panel()


def band_rows(rows, columns):
    """Rows of a band of scores in one call: all where they are one block."""
    if is_one_block(rows, columns):
        return max(rows, 1)
    return block_shape(rows, columns, True, most=MOST_BAND_ROWS)[0]


def rows_kept(rows, shape, most=None):
    """Of how many rows a forward pass keeps the scores: all, or whole blocks of that shape.

    most: scores, by default KEPT.
    """
    tall, wide = shape
    kept = (KEPT if most is None else most) // wide
    if kept >= rows:
        return rows
    return kept // tall * tall if kept * WORTH_KEEPING >= rows else 0

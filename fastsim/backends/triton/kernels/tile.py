"""The tile kernel: a product of unit rows with the epilogue of a loss on its accumulator.

One kernel serves all passes. An epilogue (epilogues/) computes the partial results of the rows and
columns of a tile, and its score gradients. The kernel stores those for which the caller gives
memory. Each tile writes to a place of its own, so nothing is added atomically.

The arguments of this kernel and of that in kept.py, in this order. An argument that a call does not
need is None and costs nothing.

x_rest, y_rest: `ScaledRows.rest`, indexed by the rows and columns of the whole matrix. The score of
    two unit rows is the product of their operands times both rests. The score gradient is
    multiplied by both rests too, so that one panel serves two products: the product with x needs
    the rests of x, the product with y those of y. The rests of the other side are divided out of
    each result at the end.
row0, row1, column0, column1: the block, rows [row0, row1) against columns [column0, column1). The
    vectors and the targets of pairs are indexed by the rows and columns of the whole matrix, all
    others by the n rows and m columns of the block.
positives ... offset, thresholds: the pairs, see fastsim/pairs/record.py.
scale, bias, positive_scale: pointers, so that the host does not wait for the numbers.
margin: a number.
levels, level_count: (K,) target values and K, for CoSENT over a matrix.
of_levels: (4, K) numbers of the levels that the epilogue reads, or (tiles, 4, K) that it writes.
of_rows, of_columns: (ROWS_IN, n) and (COLUMNS_IN, m) float32 coefficients.
panel: (n, LINE panel_lines) score gradients, or codes of kept scores (kept.py). A row consists of
    whole lines, so that stores with a mask at the end of a line are still wide.
ranges: (2, tiles, n) maxima and steps of kept scores.

The kernel is not specialised for numbers that differ from batch to batch, so it is compiled once.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.kept import keep
from fastsim.backends.triton.kernels.pairs import LEFT_OUT, all_take_part, pairs_of
from fastsim.backends.triton.kernels.places import (
    COUNTS,
    LINE,
    VECTORS,
    coefficients,
    number,
    rests,
    store,
    store_positives,
    store_score_grads,
)
from fastsim.backends.triton.kernels.product import (
    described_product,
    in_parts,
    product,
    tile_of_program,
)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def tile_kernel(
    x,
    y,
    steps,
    x_rest,
    y_rest,
    row0,
    row1,
    column0,
    column1,
    positives,
    row_ids,
    column_ids,
    row_groups,
    column_groups,
    dense,
    dense_row,
    dense_column,
    offset,
    thresholds,
    guide_x,
    guide_y,
    guide_steps,
    scale,
    bias,
    margin,
    positive_scale,
    levels,
    level_count,
    of_levels,
    of_rows,
    of_columns,
    row_out,
    column_out,
    positive_out,
    panel,
    panel_lines,
    ranges,
    EPILOGUE: tl.constexpr,  # noqa: N803
    SKIP: tl.constexpr,  # noqa: N803
    NEGATIVE: tl.constexpr,  # noqa: N803
    ROWS_IN: tl.constexpr,  # noqa: N803
    COLUMNS_IN: tl.constexpr,  # noqa: N803
    ROWS_OUT: tl.constexpr,  # noqa: N803
    COLUMNS_OUT: tl.constexpr,  # noqa: N803
    MIRRORED: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    GUIDE_PRECISION: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    SIZES: tl.constexpr,  # noqa: N803
    GUIDE_SIZES: tl.constexpr,  # noqa: N803
):
    """One tile of scores and its epilogue.

    x, y: (N, D) and (M, D) unit rows of `steps` steps in depth, as pointers or descriptors.
    guide_x, guide_y: the guide's unit rows, of `guide_steps` steps in depth. A pair is left out if
        the guide's score exceeds the row's threshold. None: if the score itself exceeds it.
    row_out: (ROWS_OUT, tiles, n) partial results by row.
    column_out: (COLUMNS_OUT, rows of tiles, m) partial results by column.
    positive_out: (n,) the score of each row with its positive.
    NEGATIVE: the target of a pair of different groups.
    GUIDE_SIZES: the sizes of the guide's product, which differ from SIZES only in depth.
    WIDTH: the epilogue takes the tile in parts of this many columns, each as a tile of its own, so
        that its values fit in registers beside the accumulator.
    MIRRORED: x is y, and each pair is computed once. The epilogue takes a tile above the diagonal
        twice: as it is, for its rows, and transposed, for its columns. In row_out the partial
        results of the columns follow those of the rows. In a tile on the diagonal, the parts below
        the diagonal are skipped: their mirror images cover them.
    """
    rows: tl.constexpr = SIZES.rows
    columns: tl.constexpr = SIZES.columns
    parts: tl.constexpr = columns // WIDTH
    writes: tl.constexpr = panel is not None and ranges is None
    height, across = row1 - row0, column1 - column0
    tile_rows, tile_columns = tl.cdiv(height, rows), tl.cdiv(across, columns)
    tile_row, tile_column = tile_of_program(tile_rows, tile_columns, SIZES.group)
    top, left = row0 + tile_row * rows, column0 + tile_column * columns
    pairs = (
        positives,
        row_ids,
        column_ids,
        row_groups,
        column_groups,
        dense,
        dense_row,
        dense_column,
        offset,
    )
    row = top + tl.arange(0, rows)
    # Past the edge the last row is read again, so that loads need no mask. Its scores are left out.
    row_at = tl.minimum(row, row1 - 1)
    y_row = tl.minimum(left + tl.arange(0, columns), column1 - 1)
    stride = steps * SIZES.depth
    if SKIP == "lower":
        # All pairs of a tile below the diagonal are left out, so that it needs no product.
        steps = tl.where(left + columns <= top + offset + 1, 0, steps)
    if MIRRORED:
        steps = tl.where(left + columns <= top, 0, steps)
    if thresholds is not None:
        threshold = tl.load(thresholds + row_at)[:, None]
        if guide_x is not None:
            # The guide's product comes first, so that only one bit for each of its pairs stays in
            # registers while the scores are computed.
            guide_scores = product(
                guide_x,
                guide_y,
                row_at,
                y_row,
                guide_steps,
                guide_steps * GUIDE_SIZES.depth,
                GUIDE_PRECISION,
                GUIDE_SIZES,
            )
            above = guide_scores > threshold
    if SIZES.descriptors:
        scores = described_product(x, y, top, left, steps, PRECISION, SIZES)
    else:
        scores = product(x, y, row_at, y_row, steps, stride, PRECISION, SIZES)
    if x_rest is not None:
        scores *= rests(x_rest, y_rest, row_at, y_row)
    if thresholds is not None:
        if guide_x is None:
            above = scores > threshold
        scores = tl.where(above, LEFT_OUT, scores)

    numbers = (number(scale), number(bias), margin, number(positive_scale))
    split = in_parts(scores, WIDTH)
    tiles = tile_columns * parts
    if MIRRORED:
        tiles += tile_rows
    row_plane = tiles.to(tl.int64) * height
    column_plane = tile_rows.to(tl.int64) * across
    for part in tl.static_range(parts):
        local = tile_column * columns + part * WIDTH + tl.arange(0, WIDTH)
        column = column0 + local
        column_at = tl.minimum(column, column1 - 1)
        begin = left + part * WIDTH
        place = tile_column * parts + part
        # Masks come after the product, whose loop needs the registers that they would fill.
        whole = all_take_part(top, begin, row1, column1, pairs, rows, WIDTH, SKIP)
        part_scores, target, own = pairs_of(
            split[part], row, column, row_at, column_at, whole, row1, column1, pairs, SKIP, NEGATIVE
        )
        row_place = place.to(tl.int64) * height
        if ranges is not None:
            in_rows = row < row1
            at = ranges + row_place + row - row0
            keep(part_scores, row - row0, local, in_rows, panel, panel_lines * LINE, at, row_plane)
        by_level = (levels, level_count, of_levels)
        if of_levels is not None and not writes:
            of_tile = (tile_row.to(tl.int64) * tiles + place) * 4 * level_count
            by_level = (levels, level_count, of_levels + of_tile)
        upper = True
        if MIRRORED:
            upper = begin + WIDTH > top
        if upper:
            if positive_out is not None:
                store_positives(part_scores, own, row, row0, row1, begin, positives, positive_out)
            kept_of_rows, kept_of_columns, score_grads = EPILOGUE(
                part_scores,
                target,
                own,
                column,
                numbers,
                coefficients(row_at - row0, of_rows, height, ROWS_IN, 1),
                coefficients(column_at - column0, of_columns, across, COLUMNS_IN, 0),
                by_level,
                writes,
            )
            store(row_out, kept_of_rows, row_plane, row_place, row - row0, row < row1, ROWS_OUT)
            column_place, inside = tile_row.to(tl.int64) * across, column < column1
            store(
                column_out, kept_of_columns, column_plane, column_place, local, inside, COLUMNS_OUT
            )
            if writes:
                score_grad = score_grads[0]
                if x_rest is not None:
                    score_grad *= rests(x_rest, y_rest, row_at, column_at)
                store_score_grads(score_grad, row, local, row0, row1, panel, panel_lines)
        if MIRRORED:  # noqa: SIM102 (decided when it is compiled)
            if begin > top + rows - 1:
                mirrored, mirrored_target, mirrored_own = pairs_of(
                    tl.trans(split[part]),
                    column,
                    row,
                    column_at,
                    row_at,
                    whole,
                    column1,
                    row1,
                    pairs,
                    SKIP,
                    NEGATIVE,
                )
                if positive_out is not None:
                    store_positives(
                        mirrored, mirrored_own, column, row0, row1, top, positives, positive_out
                    )
                kept_mirrored, _, _ = EPILOGUE(
                    mirrored,
                    mirrored_target,
                    mirrored_own,
                    row,
                    numbers,
                    coefficients(column_at - column0, of_rows, height, ROWS_IN, 1),
                    (),
                    by_level,
                    False,
                )
                mirrored_place = (tile_columns * parts + tile_row).to(tl.int64) * height
                in_rows = column < column1
                store(row_out, kept_mirrored, row_plane, mirrored_place, local, in_rows, ROWS_OUT)

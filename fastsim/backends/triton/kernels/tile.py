"""The tile kernel: a product of unit rows with the epilogue of a loss on its accumulator.

One kernel serves all passes. An epilogue (epilogues/) computes the partial results of the rows and
columns of a tile, and its score gradients. The kernel stores those for which the caller gives
memory. Each tile writes to memory that no other tile writes to, so nothing is added atomically.

This kernel and the kernel of kept.py have the following arguments, in this order. An argument that
a call does not need is None and costs nothing.

x_rest, y_rest: `ScaledRows.rest`, indexed by the rows and columns of the whole matrix. The score of
    two unit rows is the product of their operands times both rests. The score gradient is
    multiplied by both rests too, so that one panel serves two products: the product with x needs
    the rests of x, the product with y those of y. The rests of the opposite side are divided out of
    each result at the end.
row0, row1, column0, column1: the block of rows [row0, row1) and columns [column0, column1). The
    vectors and the targets of pairs are indexed by the rows and columns of the whole matrix, all
    other arguments by the n rows and m columns of the block.
positives ... offset, thresholds: the pairs, see fastsim/pairs/record.py.
scale, bias, positive_scale: pointers, so that the host does not wait for the numbers.
margin: a number.
levels, level_count: (K,) target values and K, for CoSENT over a matrix.
level_numbers: (4, K) numbers of the levels, which the epilogue reads, or (tiles, 4, K) numbers,
    which it writes.
row_coefficients, column_coefficients: (ROWS_IN, n) and (COLUMNS_IN, m) float32 coefficients.
panel: (n, LINE panel_lines) score gradients, or codes of kept scores (kept.py). A row consists of
    whole lines, so that stores with a mask at the end of a line are still wide.
ranges: (2, tiles, n) maxima and steps of kept scores.

The kernel is not specialised for numbers that differ from batch to batch, so it is compiled once.
"""

import triton
import triton.language as tl

from fastsim.backends.triton.kernels.kept import keep
from fastsim.backends.triton.kernels.loads_and_stores import (
    COUNTS,
    LINE,
    VECTORS,
    load_coefficients,
    load_number,
    rest_factors,
    store_planes,
    store_positives,
    store_score_grads,
)
from fastsim.backends.triton.kernels.pairs import LEFT_OUT, all_take_part, scores_and_targets
from fastsim.backends.triton.kernels.product import (
    descriptor_product,
    product,
    split_columns,
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
    level_numbers,
    row_coefficients,
    column_coefficients,
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
    block_rows, block_columns = row1 - row0, column1 - column0
    tile_rows, tile_columns = tl.cdiv(block_rows, rows), tl.cdiv(block_columns, columns)
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
    clamped_row = tl.minimum(row, row1 - 1)
    y_row = tl.minimum(left + tl.arange(0, columns), column1 - 1)
    stride = steps * SIZES.depth
    if SKIP == "lower":
        # All pairs of a tile below the diagonal are left out, so that it needs no product.
        steps = tl.where(left + columns <= top + offset + 1, 0, steps)
    if MIRRORED:
        steps = tl.where(left + columns <= top, 0, steps)
    if thresholds is not None:
        threshold = tl.load(thresholds + clamped_row)[:, None]
        if guide_x is not None:
            # The guide's product comes first, so that only one bit for each of its pairs stays in
            # registers while the scores are computed.
            guide_scores = product(
                guide_x,
                guide_y,
                clamped_row,
                y_row,
                guide_steps,
                guide_steps * GUIDE_SIZES.depth,
                GUIDE_PRECISION,
                GUIDE_SIZES,
            )
            above = guide_scores > threshold
    if SIZES.descriptors:
        scores = descriptor_product(x, y, top, left, steps, PRECISION, SIZES)
    else:
        scores = product(x, y, clamped_row, y_row, steps, stride, PRECISION, SIZES)
    if x_rest is not None:
        scores *= rest_factors(x_rest, y_rest, clamped_row, y_row)
    if thresholds is not None:
        if guide_x is None:
            above = scores > threshold
        scores = tl.where(above, LEFT_OUT, scores)

    numbers = (load_number(scale), load_number(bias), margin, load_number(positive_scale))
    split = split_columns(scores, WIDTH)
    tiles = tile_columns * parts
    if MIRRORED:
        tiles += tile_rows
    row_plane = tiles.to(tl.int64) * block_rows
    column_plane = tile_rows.to(tl.int64) * block_columns
    for part in tl.static_range(parts):
        local = tile_column * columns + part * WIDTH + tl.arange(0, WIDTH)
        column = column0 + local
        clamped_column = tl.minimum(column, column1 - 1)
        part_left = left + part * WIDTH
        part_index = tile_column * parts + part
        # Masks come after the product, whose loop needs the registers that they would fill.
        whole = all_take_part(top, part_left, row1, column1, pairs, rows, WIDTH, SKIP)
        part_scores, target, is_positive = scores_and_targets(
            split[part],
            row,
            column,
            clamped_row,
            clamped_column,
            whole,
            row1,
            column1,
            pairs,
            SKIP,
            NEGATIVE,
        )
        row_offset = part_index.to(tl.int64) * block_rows
        if ranges is not None:
            in_rows = row < row1
            range_pointers = ranges + row_offset + row - row0
            keep(
                part_scores,
                row - row0,
                local,
                in_rows,
                panel,
                panel_lines * LINE,
                range_pointers,
                row_plane,
            )
        level_arguments = (levels, level_count, level_numbers)
        if level_numbers is not None and not writes:
            level_offset = (tile_row.to(tl.int64) * tiles + part_index) * 4 * level_count
            level_arguments = (levels, level_count, level_numbers + level_offset)
        has_upper_pairs = True
        if MIRRORED:
            has_upper_pairs = part_left + WIDTH > top
        if has_upper_pairs:
            if positive_out is not None:
                store_positives(
                    part_scores, is_positive, row, row0, row1, part_left, positives, positive_out
                )
            row_values, column_values, score_grads = EPILOGUE(
                part_scores,
                target,
                is_positive,
                column,
                numbers,
                load_coefficients(clamped_row - row0, row_coefficients, block_rows, ROWS_IN, 1),
                load_coefficients(
                    clamped_column - column0, column_coefficients, block_columns, COLUMNS_IN, 0
                ),
                level_arguments,
                writes,
            )
            store_planes(
                row_out, row_values, row_plane, row_offset, row - row0, row < row1, ROWS_OUT
            )
            column_offset, inside = tile_row.to(tl.int64) * block_columns, column < column1
            store_planes(
                column_out, column_values, column_plane, column_offset, local, inside, COLUMNS_OUT
            )
            if writes:
                score_grad = score_grads[0]
                if x_rest is not None:
                    score_grad *= rest_factors(x_rest, y_rest, clamped_row, clamped_column)
                store_score_grads(score_grad, row, local, row0, row1, panel, panel_lines)
        if MIRRORED:  # noqa: SIM102 (decided when it is compiled)
            if part_left > top + rows - 1:
                mirrored, mirrored_target, mirrored_is_positive = scores_and_targets(
                    tl.trans(split[part]),
                    column,
                    row,
                    clamped_column,
                    clamped_row,
                    whole,
                    column1,
                    row1,
                    pairs,
                    SKIP,
                    NEGATIVE,
                )
                if positive_out is not None:
                    store_positives(
                        mirrored,
                        mirrored_is_positive,
                        column,
                        row0,
                        row1,
                        top,
                        positives,
                        positive_out,
                    )
                mirrored_values, _, _ = EPILOGUE(
                    mirrored,
                    mirrored_target,
                    mirrored_is_positive,
                    row,
                    numbers,
                    load_coefficients(
                        clamped_column - column0, row_coefficients, block_rows, ROWS_IN, 1
                    ),
                    (),
                    level_arguments,
                    False,
                )
                mirrored_offset = (tile_columns * parts + tile_row).to(tl.int64) * block_rows
                in_rows = column < column1
                store_planes(
                    row_out, mirrored_values, row_plane, mirrored_offset, local, in_rows, ROWS_OUT
                )

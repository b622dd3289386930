"""The passes of the engine as launches, with the state of each kind of loss and its merge."""

import torch

from fastsim.backends.triton.kernels import pairs
from fastsim.backends.triton.kernels.epilogues import (
    contrast,
    elementwise,
    levels,
    selection,
    softmax,
)
from fastsim.backends.triton.kernels.tile_launches import NO_INPUTS, EpilogueInputs, Launch
from fastsim.kinds.kind import COLUMNS, MATRIX, ROWS, joined, with_partials

LEFT_OUT = pairs.LEFT_OUT.value


def tile_launch(tile, unit_x, unit_y, *, score_grads, keep=False):
    """The launches of a tile loss."""
    ids = tile.pairs.row_ids is not None
    light = tile.kind in ("softmax", "squared_error") and tile.pairs.one_positive and not ids
    heavy = 1 + (ids or tile.kind == "multi_positive") if score_grads else int(not light)
    return Launch(tile.pairs, unit_x, unit_y, tile=tile, heavy=heavy, keep=keep)


def forward(tile, unit_x, unit_y, sums=None):
    """The state of the loss over the whole matrix; `sums` as in `Backend.forward`."""
    run = tile_launch(tile, unit_x, unit_y, score_grads=False)
    collector = _FORWARDS[tile.kind](tile, run, unit_y.shape[0])
    if sums is not None:
        collector.sums_of_row = sums
    if tile.rows_alone:
        run.mirror(collector.per_tile)
    for rows in run.bands(collector.per_tile):
        collector.add(run, rows)
    return collector.result()


def fused_pass(tile, unit_x, unit_y, block, weights, panel):
    """The state of a block of whole rows; writes its score gradients to `panel`.

    weights: the weights of the losses of the block's rows, or None.

    The scores are computed once where that is possible. Elementwise losses write score gradients in
    the forward pass. Other losses compute them from the scores that the forward pass keeps
    (kept.py). With a float32 panel, or with rows so short that keeping is not faster, the scores
    are computed again.
    """
    elementwise = tile.record.elementwise
    run = tile_launch(tile, unit_x, unit_y, score_grads=elementwise, keep=not elementwise)
    collector = _FORWARDS[tile.kind](tile, run, unit_y.shape[0])
    if elementwise:
        collector.add(run, block[0], inputs=EpilogueInputs(weights[None]), panel=panel)
        return collector.result()
    kept_scores = {"panel": panel, "ranges": run.ranges(*block)} if run.keeps else {}
    collector.add(run, block[0], **kept_scores)
    state = collector.result()
    coefficients = tile.coefficients(state, 1.0 if weights is None else weights.double())
    if kept_scores:
        epilogue = _SCORE_GRADS[tile.kind]
        inputs = _epilogue_inputs(tile, coefficients)
        run.kept_score_grads(*block, epilogue, inputs=inputs, **kept_scores)
    else:
        score_grad(tile, unit_x, unit_y, block, coefficients, panel)
    return state


def score_grad(tile, unit_x, unit_y, block, coefficients, panel):
    """Writes the score gradients of a block to `panel`, from the coefficients of the block."""
    run = tile_launch(tile, unit_x, unit_y, score_grads=True)
    inputs = _epilogue_inputs(tile, coefficients)
    run(*block, _SCORE_GRADS[tile.kind], inputs=inputs, panel=panel)


def _epilogue_inputs(tile, coefficients):
    """The coefficients as the kernels take them: one tensor for each axis."""
    axes = {}
    for axis, coefficient in zip(tile.record.coefficient_axes, coefficients, strict=True):
        if coefficient is not None:
            axes.setdefault(axis, []).append(coefficient)
    stacked = {axis: torch.stack(tensors).float() for axis, tensors in axes.items()}
    return EpilogueInputs(stacked.get(ROWS), stacked.get(COLUMNS), tile.levels, stacked.get(MATRIX))


class _SoftmaxForward:
    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        self.matrix = tile.pairs.dense is not None or tile.pairs.row_groups is not None
        rows = run.sizes.rows * (4 if self.matrix else 2)
        self.per_tile = 4 * (rows + 2 * tile.symmetric * run.width)
        self.rows = []
        self.column_state = None
        self.one_positive = tile.pairs.one_positive
        if tile.symmetric:
            self.column_state = [run.unit_x.new_empty(columns, dtype=torch.float32) for _ in "ts"]

    def add(self, run, rows, **outputs):
        tile_rows, _ = run.tiles(rows, self.columns)
        count, columns = rows.stop - rows.start, self.columns.stop

        def empty(*shape):
            return run.unit_x.new_empty(shape, dtype=torch.float32)

        planes = run.row_partials(rows, self.columns, LEFT_OUT, *(0.0,) * (3 if self.matrix else 1))
        column_planes = empty(2, tile_rows, columns) if self.tile.symmetric else None
        positive = empty(count) if self.one_positive else None
        outputs |= {"row_out": planes, "column_out": column_planes, "positive_out": positive}
        run(rows, self.columns, softmax.softmax_forward, **outputs)
        top, total = empty(count), empty(count)
        run.merge(*planes[:2], top, total)
        state = [top.double(), total.double()]
        if self.matrix:
            target_scores, target_sums = planes[2:].sum(1, dtype=torch.float64)
            state += [target_scores * self.tile.scale, target_sums]
        elif self.one_positive:
            # The margin is subtracted in float32, as in the kernels.
            positive = positive - self.tile.margin if self.tile.margin else positive
            state += [positive.double() * self.tile.scale, torch.ones_like(state[0])]
        else:
            state += [torch.zeros_like(state[0]), torch.zeros_like(state[0])]
        self.rows.append(state)
        if self.tile.symmetric:
            run.merge(*column_planes, *self.column_state, accumulate=rows.start > 0)

    def result(self):
        state = joined(self.rows)
        if self.tile.symmetric:
            state += [part.double() for part in self.column_state]
        return state


class _LossForward:
    """Kinds whose state is `parts` sums over each row."""

    def __init__(self, tile, run, columns):
        self.columns, self.epilogue = slice(0, columns), _SCORE_GRADS[tile.kind]
        self.parts = sum(part.size for part in tile.parts)
        self.per_tile = 4 * self.parts * run.sizes.rows
        self.rows = []

    def add(self, run, rows, **outputs):
        planes = run.row_partials(rows, self.columns, *(0.0,) * self.parts)
        run(rows, self.columns, self.epilogue, row_out=planes, **outputs)
        self.rows.append(list(planes.sum(1, dtype=torch.float64)))

    def result(self):
        return joined(self.rows)


class _ContrastForward:
    """Kinds that sum exponentials of the negatives; multi_similarity also sums the positives'."""

    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        self.both = tile.kind == "multi_similarity"
        self.per_tile = 16 * run.sizes.rows
        self.rows = []

    def add(self, run, rows, **outputs):
        self.rows.append([part.double() for part in self.sums(run, rows, **outputs)])

    def sums(self, run, rows, **outputs):
        """Maxima and sums of exponentials of each row's negatives, and then of its positives."""
        planes = run.row_partials(rows, self.columns, *(LEFT_OUT, 0.0) * (1 + self.both))
        run(rows, self.columns, contrast.contrast_forward, row_out=planes, **outputs)
        merged = torch.empty_like(planes[:, 0])
        run.merge(*planes[:2], *merged[:2])
        if self.both:
            run.merge(*planes[2:], *merged[2:], positives=True)
        return merged

    def result(self):
        return joined(self.rows)


class _MultiPositiveForward(_ContrastForward):
    sums_of_row = None  # maxima and sums of the negatives, if these columns are only a part

    def add(self, run, rows, **outputs):
        if self.sums_of_row is None:
            top, total = self.sums(run, rows, **outputs)
        else:
            top, total = (part[rows].float() for part in self.sums_of_row)
        planes = run.row_partials(rows, self.columns, 0.0, 0.0)
        inputs = EpilogueInputs(torch.stack([top, total.log()]))
        run(rows, self.columns, contrast.multi_positive_forward, inputs=inputs, row_out=planes)
        self.rows.append([top.double(), total.double(), *planes.sum(1, dtype=torch.float64)])


class _DecoupledForward:
    """The decoupled loss: sums of exponentials of the negatives, and the positive's logit."""

    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        self.per_tile = 8 * run.sizes.rows
        self.rows = []

    def add(self, run, rows, **outputs):
        planes = run.row_partials(rows, self.columns, LEFT_OUT, 0.0)
        top, total, positive = planes.new_empty(3, rows.stop - rows.start)
        outputs |= {"row_out": planes, "positive_out": positive}
        run(rows, self.columns, contrast.decoupled_forward, **outputs)
        run.merge(*planes, top, total)
        self.rows.append([top.double(), total.double(), positive.double() * self.tile.scale])

    def result(self):
        return joined(self.rows)


class _LevelsForward:
    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        count = tile.levels.numel()
        self.per_tile = 16 * count
        self.top = tile.levels.new_full((2, count), LEFT_OUT, dtype=torch.float64)
        self.sum = torch.zeros_like(self.top)

    def add(self, run, rows, **outputs):
        tile_rows, tile_columns = run.tiles(rows, self.columns)
        values, scale = self.tile.levels, self.tile.scale
        out = values.new_empty(
            (tile_rows * tile_columns, 2, 2, values.numel()), dtype=torch.float32
        )
        inputs = EpilogueInputs(levels=values, level_numbers=out)
        run(rows, self.columns, levels.levels_forward, inputs=inputs, **outputs)
        partials = out.double().unbind(2)
        self.top, self.sum = with_partials(self.top, self.sum, *partials, scale)

    def result(self):
        return [self.top, self.sum]


_FORWARDS = {
    "softmax": _SoftmaxForward,
    "sigmoid": _LossForward,
    "squared_error": _LossForward,
    "multi_similarity": _ContrastForward,
    "multi_positive": _MultiPositiveForward,
    "decoupled": _DecoupledForward,
    "levels": _LevelsForward,
}
_SCORE_GRADS = {
    "softmax": softmax.softmax_score_grad,
    "sigmoid": elementwise.sigmoid,
    "squared_error": elementwise.squared_error,
    "multi_similarity": contrast.multi_similarity_score_grad,
    "multi_positive": contrast.multi_positive_score_grad,
    "decoupled": contrast.decoupled_score_grad,
    "levels": levels.levels_score_grad,
}

KINDS = {*_FORWARDS, "closest", "hardest"}


# ---- selection ----


def positive_scores(pairs, unit_x, unit_y):
    """The score (N,) of each row's positive."""
    return Launch(pairs, unit_x, unit_y).positive_scores()


def closest(pairs, semi_hard, unit_x, unit_y, ceilings=None):
    """The column (N,) of each row's closest negative, -1 if it has none."""
    run = Launch(pairs, unit_x, unit_y)
    columns, ceiling = slice(0, unit_y.shape[0]), None
    if semi_hard:
        ceiling = run.positive_scores() if ceilings is None else ceilings
    chosen = []
    for band in run.bands(8 * run.sizes.rows):
        inputs = NO_INPUTS if ceiling is None else EpilogueInputs(ceiling[None, band])
        planes = run.row_partials(band, columns, LEFT_OUT, 0.0)
        run(band, columns, selection.closest_forward, inputs=inputs, row_out=planes)
        chosen.append(_best_column(*planes))
    return torch.cat(chosen)


def hardest(pairs, offsets, x, y):
    """The columns ((N,), (N,)) of each row's hardest positive and negative, -1 if it has none."""
    run = Launch(pairs, x, y)
    columns = slice(0, y.shape[0])
    inputs = (
        NO_INPUTS if offsets is None else EpilogueInputs(column_coefficients=offsets.float()[None])
    )
    chosen = []
    for band in run.bands(16 * run.sizes.rows):
        planes = run.row_partials(band, columns, *(LEFT_OUT, 0.0) * 2)
        run(band, columns, selection.hardest_forward, inputs=inputs, row_out=planes)
        chosen.append([_best_column(*planes[:2]), _best_column(*planes[2:])])
    return tuple(joined(chosen))


def _best_column(top, column):
    """The column (N,) of each row's largest score, the first among equals; -1 if it has no score.

    top, column: (tiles, N) the largest score in each tile, and its column, an integer in the bits
        of a float32.
    """
    column = column.view(torch.int32)
    best = top.amax(0)
    first = torch.where(top == best, column, torch.iinfo(torch.int32).max).amin(0)
    return torch.where(best > LEFT_OUT, first, -1).long()

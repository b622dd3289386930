"""The passes of the engine over the launches: what each loss keeps, and how it is merged."""

import functools

import torch

from fastsim.backends.triton.kernels import epilogues, pairs
from fastsim.backends.triton.kernels.arguments import (
    ClosestPartials,
    ContrastPartials,
    ContrastScoreGrad,
    HardestPartials,
    LevelPartials,
    LevelScoreGrad,
    LossPartials,
    Numbers,
    PositivePartials,
    PositiveScoreGrad,
    SoftmaxPartials,
    SoftmaxScoreGrad,
    Weights,
)
from fastsim.backends.triton.kernels.launches import Launch

LEFT_OUT = pairs.LEFT_OUT.value


def tile_launch(tile, unit_x, unit_y, *, score_grads):
    """The launches of a tile loss."""
    margin = float(tile.margin) or None
    positive_scale = None
    if "positive_scale" in tile.record.parameters:
        positive_scale = torch.full_like(tile.scale, tile.positive_scale)
    numbers = Numbers(tile.scale, tile.bias, margin, positive_scale)
    light = tile.kind in ("softmax", "squared_error") and tile.pairs.one_positive
    return Launch(tile.pairs, numbers, unit_x, unit_y, heavy=score_grads or not light)


def forward(tile, unit_x, unit_y, sums=None):
    """The state of the loss over the whole matrix; `sums` as in `Backend.forward`."""
    run = tile_launch(tile, unit_x, unit_y, score_grads=False)
    kept = _FORWARDS[tile.kind](tile, run, unit_y.shape[0])
    if sums is not None:
        kept.known = sums
    if tile.rows_alone:
        run.mirror(kept.per_tile)
    for rows in run.bands(kept.per_tile):
        kept.add(run, rows)
    return kept.result()


def fused_pass(tile, unit_x, unit_y, block, weights, panel):
    """The state of a block of whole rows, and its score gradients in `panel`; `weights` of the
    block.

    One product of the scores: a score gradient that depends on its score and row alone is written
    by the forward reduction itself, any other from the scores that the forward reduction keeps (see
    kept.py). A panel of float32, or rows too short for it to pay, keep nothing, and the scores are
    multiplied again.
    """
    together = tile.record.elementwise
    run = tile_launch(tile, unit_x, unit_y, score_grads=together)
    forward = _FORWARDS[tile.kind](tile, run, unit_y.shape[0])
    epilogue = _SCORE_GRAD_EPILOGUES[tile.kind]
    if together:
        forward.add(run, block[0], score_grad=epilogue, work=_work(panel, Weights(weights)))
        return forward.result()
    kept = run.keeping(*block, panel) if run.keeps else None
    forward.add(run, block[0], work={"kept": kept})
    state = forward.result()
    coefficients = tile.coefficients(state, 1.0 if weights is None else weights.double())
    if kept is None:
        score_grad(tile, unit_x, unit_y, block, coefficients, panel)
    else:
        work = _work(panel, _SCORE_GRADS[tile.kind](tile, coefficients))
        run.kept_score_grads(*block, score_grad=epilogue, kept=kept, **work)
    return state


def score_grad(tile, unit_x, unit_y, block, coefficients, panel):
    """The score gradients of a block in `panel` from the coefficients of its rows and columns."""
    run = tile_launch(tile, unit_x, unit_y, score_grads=True)
    work = _work(panel, _SCORE_GRADS[tile.kind](tile, coefficients))
    run(*block, score_grad=_SCORE_GRAD_EPILOGUES[tile.kind], **work)


def _work(panel, coefficients):
    return {"coefficients": coefficients, "panel": panel, "panel_stride": panel.stride(0)}


class _SoftmaxForward:
    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        self.matrix = tile.pairs.dense is not None or tile.pairs.row_groups is not None
        sizes, arrays = run.sizes, 4 if self.matrix else 2
        self.per_tile = 4 * (arrays * sizes.rows + 2 * tile.symmetric * sizes.columns // run.parts)
        self.rows = []
        self.column_state = None
        self.one = tile.pairs.one_positive
        if tile.symmetric:
            self.column_state = [run.unit_x.new_empty(columns, dtype=torch.float32) for _ in "ts"]

    def add(self, run, rows, work=None):
        tall, _ = run.tiles(rows, self.columns)
        count, columns = rows.stop - rows.start, self.columns.stop

        def empty(*shape):
            return run.unit_x.new_empty(shape, dtype=torch.float32)

        def of_rows(fill=0.0):
            return run.row_partials(rows, self.columns, fill)

        partials = SoftmaxPartials(
            of_rows(LEFT_OUT),
            of_rows(),
            empty(count) if self.one else None,
            *((of_rows(), of_rows()) if self.matrix else (None, None)),
            *((empty(tall, columns), empty(tall, columns)) if self.tile.symmetric else (None,) * 2),
        )
        run(
            rows, self.columns, forward=epilogues.softmax_forward, partials=partials, **(work or {})
        )
        top, total = empty(count), empty(count)
        run.merge(partials.row_top, partials.row_sum, top, total, running=False)
        state = [top.double(), total.double()]
        if self.matrix:
            state.append(partials.target_scores.sum(0, dtype=torch.float64) * self.tile.scale)
            state.append(partials.target_sums.sum(0, dtype=torch.float64))
        elif self.one:
            state.append(partials.positive.double() * self.tile.scale)
            state.append(torch.ones_like(state[0]))
        else:
            state += [torch.zeros_like(state[0]), torch.zeros_like(state[0])]
        self.rows.append(state)
        if self.tile.symmetric:
            running = rows.start > 0
            run.merge(partials.column_top, partials.column_sum, *self.column_state, running=running)

    def result(self):
        state = joined(self.rows)
        if self.tile.symmetric:
            state += [part.double() for part in self.column_state]
        return state


class _LossForward:
    """Losses that are sums over the row: `parts` of them."""

    def __init__(self, tile, run, columns, *, epilogue, parts):
        self.columns, self.parts, self.epilogue = slice(0, columns), parts, epilogue
        self.per_tile = 4 * parts * run.sizes.rows
        self.rows = []

    def add(self, run, rows, score_grad=None, work=None):
        sums = [run.row_partials(rows, self.columns) for _ in range(self.parts)]
        partials = LossPartials(*sums)
        run(
            rows,
            self.columns,
            forward=self.epilogue,
            score_grad=score_grad,
            partials=partials,
            **(work or {}),
        )
        self.rows.append([part.sum(0, dtype=torch.float64) for part in sums])

    def result(self):
        return joined(self.rows)


_sigmoid_forward = functools.partial(_LossForward, epilogue=epilogues.sigmoid_forward, parts=2)
_squared_error_forward = functools.partial(
    _LossForward, epilogue=epilogues.squared_error_forward, parts=1
)


class _ContrastForward:
    """Positives against negatives: multi-similarity, and the negatives of the other."""

    def __init__(self, tile, run, columns):
        self.columns = slice(0, columns)
        self.both = tile.kind == "multi_similarity"
        self.per_tile = 16 * run.sizes.rows
        self.rows = []

    def add(self, run, rows, work=None):
        self.rows.append([part.double() for part in self.sums(run, rows, work)])

    def sums(self, run, rows, work):
        """Maximum and sum of exponentials of negatives, of positives, by row."""
        count = rows.stop - rows.start
        fills = (LEFT_OUT, 0.0) * (1 + self.both)
        parts = [run.row_partials(rows, self.columns, fill) for fill in fills]
        run(
            rows,
            self.columns,
            forward=epilogues.contrast_forward,
            partials=ContrastPartials(*parts),
            **(work or {}),
        )
        merged = [run.unit_x.new_empty(count, dtype=torch.float32) for _ in parts]
        scales = run.numbers.scale, run.numbers.positive_scale
        for side, scale in zip((0, 2)[: 1 + self.both], scales, strict=False):
            two = slice(side, side + 2)
            run.merge(*parts[two], *merged[two], running=False, scale=scale)
        return merged

    def result(self):
        return joined(self.rows)


class _MultiPositiveForward(_ContrastForward):
    known = None  # maxima and sums of the negatives of more columns than these

    def add(self, run, rows, work=None):
        if self.known is None:
            top, total = self.sums(run, rows, work)
        else:
            top, total = (part[rows].float() for part in self.known)
        loss, score_grad = (run.row_partials(rows, self.columns) for _ in range(2))
        partials = PositivePartials(loss, score_grad, top, total.log())
        run(rows, self.columns, forward=epilogues.multi_positive_forward, partials=partials)
        sums = [part.sum(0, dtype=torch.float64) for part in (loss, score_grad)]
        self.rows.append([top.double(), total.double(), *sums])


class _LevelsForward:
    def __init__(self, tile, run, columns):
        self.tile, self.columns = tile, slice(0, columns)
        count = tile.levels.numel()
        self.per_tile = 16 * count
        self.top = tile.levels.new_full((2, count), LEFT_OUT, dtype=torch.float64)
        self.sum = torch.zeros_like(self.top)

    def add(self, run, rows, work=None):
        tall, wide = run.tiles(rows, self.columns)
        levels, scale = self.tile.levels, self.tile.scale
        out = levels.new_empty((tall * wide, 2, 2, levels.numel()), dtype=torch.float32)
        partials = LevelPartials(out, levels, levels.numel())
        run(rows, self.columns, forward=epilogues.levels_forward, partials=partials, **(work or {}))
        tops, sums = out.double().unbind(2)
        top = torch.maximum(self.top, tops.amax(0))
        grown = (sums * (scale * (tops - top)).exp()).sum(0)
        self.sum = self.sum * (scale * (self.top - top)).exp() + grown
        self.top = top

    def result(self):
        return [self.top, self.sum]


def joined(parts):
    """Lists of tensors, one list per band of rows -> one list."""
    return parts[0] if len(parts) == 1 else list(map(torch.cat, zip(*parts, strict=True)))


def _softmax_score_grad(tile, coefficients):
    return SoftmaxScoreGrad(*(None if c is None else c.float() for c in coefficients))


def _weights(tile, coefficients):
    return Weights(coefficients[0].float())


def _contrast_score_grad(tile, coefficients):
    return ContrastScoreGrad(*(c.float() for c in coefficients))


def _positive_score_grad(tile, coefficients):
    return PositiveScoreGrad(*(c.float() for c in coefficients))


def _level_score_grad(tile, coefficients):
    return LevelScoreGrad(*(c.float() for c in coefficients), tile.levels, tile.levels.numel())


_FORWARDS = {
    "softmax": _SoftmaxForward,
    "sigmoid": _sigmoid_forward,
    "squared_error": _squared_error_forward,
    "multi_similarity": _ContrastForward,
    "multi_positive": _MultiPositiveForward,
    "levels": _LevelsForward,
}
_SCORE_GRADS = {
    "softmax": _softmax_score_grad,
    "sigmoid": _weights,
    "squared_error": _weights,
    "multi_similarity": _contrast_score_grad,
    "multi_positive": _positive_score_grad,
    "levels": _level_score_grad,
}
_SCORE_GRAD_EPILOGUES = {
    "softmax": epilogues.softmax_score_grad,
    "sigmoid": epilogues.sigmoid_score_grad,
    "squared_error": epilogues.squared_error_score_grad,
    "multi_similarity": epilogues.multi_similarity_score_grad,
    "multi_positive": epilogues.multi_positive_score_grad,
    "levels": epilogues.levels_score_grad,
}

KINDS = {*_FORWARDS, "closest", "hardest"}


# ---- selection ----


def positive_scores(pairs, unit_x, unit_y):
    """Score (N,) of each row's positive."""
    return Launch(pairs, Numbers(), unit_x, unit_y).positive_scores()


def closest(pairs, semi_hard, unit_x, unit_y, ceilings=None):
    """Column (N,) of each row's closest negative, -1 where it has none."""
    run = Launch(pairs, Numbers(), unit_x, unit_y)
    columns = slice(0, unit_y.shape[0])
    ceiling = None
    if semi_hard:
        ceiling = run.positive_scores() if ceilings is None else ceilings
    found = []
    for band in run.bands(8 * run.sizes.rows):
        shape = run.tiles(band, columns)[1], band.stop - band.start
        top = unit_x.new_empty(shape, dtype=torch.float32)
        column = unit_x.new_empty(shape, dtype=torch.int32)
        partials = ClosestPartials(top, column, None if ceiling is None else ceiling[band])
        run(band, columns, forward=epilogues.closest_forward, partials=partials)
        found.append(_first_of(top, column))
    return torch.cat(found)


def hardest(pairs, offsets, x, y):
    """Columns ((N,), (N,)) of each row's hardest positive and negative, -1 where it has none."""
    run = Launch(pairs, Numbers(), x, y)
    columns = slice(0, y.shape[0])
    offsets = None if offsets is None else offsets.float()
    found = []
    for band in run.bands(16 * run.sizes.rows):
        shape = run.tiles(band, columns)[1], band.stop - band.start
        low, high = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
        low_column, high_column = (x.new_empty(shape, dtype=torch.int32) for _ in range(2))
        partials = HardestPartials(low, low_column, high, high_column, offsets)
        run(band, columns, forward=epilogues.hardest_forward, partials=partials)
        found.append([_first_of(-low, low_column), _first_of(high, high_column)])
    return tuple(joined(found))


def _first_of(top, column):
    """Over tiles: the column of the largest, the smallest among equals, -1 for none at all."""
    best = top.amax(0)
    first = torch.where(top == best, column, torch.iinfo(torch.int32).max).amin(0)
    return torch.where(best > LEFT_OUT, first, -1).long()

"""The passes of the engine as CUDA operators: the state of each kind of loss, and how it is merged.

Partial results are (columns of tiles, rows) and (rows of tiles, columns) float32. No two tiles
write to the same memory (csrc/cuda/arguments.h). Partial results are added up in one order.
"""

from dataclasses import fields

import torch

from fastsim.kinds.kind import EMPTY, joined, with_partials
from fastsim.pairs import Pairs
from fastsim.precision import float32_products
from fastsim.tile_loss import TileLoss

PARTIALS = 128 << 20  # bytes of partial results alive
LINE = 128  # bytes: unit rows are padded to whole lines
HALF, TF32, FULL = "half", "tf32", "full"  # Product of csrc/cuda/arguments.h

# The fields that the kernels know. Any other field that is not at its default is refused.
KNOWN_FIELDS = {
    TileLoss: {"kind", "pairs", "scale", "bias", "margin", "normalise", "symmetric", "levels"}
    | {"group"},  # its ranks merge the state outside
    Pairs: {"positives", "row_ids", "column_ids", "row_groups", "column_groups", "dense"}
    | {"negative_target", "skip"}
    | {"distinct"},  # a hint that they do not use
}


def check_known(part, what):
    """RuntimeError for a field of a TileLoss or Pairs that the kernels do not know."""
    for field in fields(part):
        if field.name not in KNOWN_FIELDS[type(part)]:
            value = getattr(part, field.name)
            if value is not field.default and value != field.default:
                refuse(f"it does not know {field.name} of {what}")


def refuse(what):
    raise RuntimeError(f"backend 'cuda' cannot be used: {what}")


def check_tile(tile):
    """RuntimeError for a loss or an option that the kernels do not know."""
    if tile.kind not in _FORWARDS:
        refuse(f"it has no kernels of kind {tile.kind!r}")
    check_known(tile, f"{tile.kind} losses")
    check_known(tile.pairs, f"the pairs of {tile.kind} losses")
    if tile.pairs.untargeted:
        refuse(f"its {tile.kind} losses need targets")


def operators():
    return torch.ops.fastsim_cuda


def stream(tensor):
    """The current stream of the tensor's device, as a number."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


# ---- rows ----


def product(dtype):
    """The kind of product that computes scores of inputs or operands of this dtype."""
    if dtype.itemsize == 2:
        return HALF
    return FULL if float32_products("cuda") == "highest" else TF32


def unit_rows(x, dtype):
    """(unit rows, inverse norms); operands (dtype None) are padded to whole lines."""
    rows, depth = x.shape
    unit = x.new_empty(rows, depth, dtype=dtype) if dtype else _padded(x, product(x.dtype))
    inverse = x.new_empty(rows, dtype=torch.float32)
    # Rows in a given dtype are not operands: they keep all their bits.
    kind = product(x.dtype) if dtype is None else FULL
    operators().unit_rows(x, unit, inverse, kind, stream(x))
    return unit[:, :depth], inverse


def operand(unit, dtype):
    """Unit rows in the compute type as operands for inputs of `dtype`."""
    kind = product(dtype)
    padded = _padded(unit, kind)
    operators().unit_rows(unit, padded, None, kind, stream(unit))
    return padded[:, : unit.shape[1]]


def _padded(x, kind):
    dtype = torch.float16 if kind == HALF else torch.float32
    step = LINE // dtype.itemsize
    return x.new_empty(x.shape[0], -(-x.shape[1] // step) * step, dtype=dtype)


def unit_rows_backward(grad_unit, x, inverse, factor, dtype):
    grad, dots = x.new_empty(x.shape, dtype=dtype), torch.empty_like(inverse)
    factor = factor.to(inverse.dtype)
    operators().unit_rows_backward(grad_unit, x, inverse, factor, grad, dots, stream(x))
    return grad, dots


# ---- tiles ----


class Launch:
    """The launches over the unit rows of x and y."""

    def __init__(self, pairs, unit_x, unit_y):
        self.unit_x, self.unit_y, self.pairs = unit_x, unit_y, pairs
        vectors = (None if v is None else v.contiguous() for v in pairs.tensors()[:-1])
        self.pair_arguments = (*vectors, pairs.dense, pairs.negative_target, pairs.skip)
        self.product = product(unit_x.dtype)
        self.size = operators().tile_size()
        self.whole_matrix = slice(0, unit_x.shape[0]), slice(0, unit_y.shape[0])

    def __call__(self, operator, block, *arguments):
        rows, columns = block
        ends = rows.start, rows.stop, columns.start, columns.stop
        tiles = *ends, *self.pair_arguments, stream(self.unit_x)  # TILES of csrc/cuda/ops.cpp
        operator(self.unit_x, self.unit_y, self.product, *tiles, *arguments)

    def tiles(self, block):
        """(rows, columns) of tiles of a block."""
        return tuple(-(-(part.stop - part.start) // self.size) for part in block)

    def bands(self, per_tile):
        """Yields blocks of whole rows whose tiles have at most PARTIALS bytes of partial results.

        per_tile: bytes of partial results of a tile.
        """
        rows, columns = self.whole_matrix
        _, tile_columns = self.tiles(self.whole_matrix)
        height = max(1, PARTIALS // (tile_columns * per_tile)) * self.size
        for top in range(0, rows.stop, height):
            yield slice(top, min(rows.stop, top + height)), columns

    def empty(self, *shape):
        return self.unit_x.new_empty(shape, dtype=torch.float32)

    def row_partials(self, block):
        return self.empty(self.tiles(block)[1], block[0].stop - block[0].start)

    def column_partials(self, block):
        return self.empty(self.tiles(block)[0], block[1].stop - block[1].start)

    def merge(self, tops, sums, scale, into=None):
        """(tiles, n) maxima and sums of exponentials -> (n,) each.

        into: None, or such a result, into which they are merged.
        """
        top, total = into or (self.empty(tops.shape[1]) for _ in "ts")
        accumulate = into is not None
        operators().merge(tops, sums, scale, accumulate, top, total, stream(tops))
        return [top, total]


def forward(tile, unit_x, unit_y):
    """The state of the loss over the whole matrix."""
    check_tile(tile)
    run = Launch(tile.pairs, unit_x, unit_y)
    collector = _FORWARDS[tile.kind](tile, run)
    for block in run.bands(collector.per_tile):
        collector.add(block)
    return collector.result()


def fused_pass(tile, unit_x, unit_y, block, weights, panel):
    """The state of a block of whole rows; writes its score gradients to `panel`.

    weights: those of the losses of the block, or None.
    """
    check_tile(tile)
    collector = _FORWARDS[tile.kind](tile, Launch(tile.pairs, unit_x, unit_y))
    if tile.record.elementwise:
        collector.add(block, weights.float(), panel)
        return collector.result()
    collector.add(block)
    state = collector.result()
    coefficients = tile.coefficients(state, 1.0 if weights is None else weights.double())
    score_grad(tile, unit_x, unit_y, block, coefficients, panel)
    return state


def score_grad(tile, unit_x, unit_y, block, coefficients, panel):
    """Writes the score gradients of a block to `panel`, from the coefficients of the block."""
    check_tile(tile)
    run = Launch(tile.pairs, unit_x, unit_y)
    coefficients = [None if c is None else c.float().contiguous() for c in coefficients]
    _SCORE_GRADS[tile.kind](tile, run, block, coefficients, panel)


class _SoftmaxForward:
    def __init__(self, tile, run):
        self.tile, self.run, self.rows, self.column_state = tile, run, [], None
        arrays = 2 if tile.pairs.one_positive else 4
        self.per_tile = 4 * run.size * (arrays + 2 * tile.symmetric)

    def add(self, block):
        tile, run = self.tile, self.run
        one_positive, height = tile.pairs.one_positive, block[0].stop - block[0].start
        tops, sums = run.row_partials(block), run.row_partials(block)
        positive = run.empty(height) if one_positive else None
        targets = (None, None)
        if not one_positive:
            targets = run.row_partials(block), run.row_partials(block)
        columns = (None, None)
        if tile.symmetric:
            columns = run.column_partials(block), run.column_partials(block)
        forward = operators().softmax_forward
        run(forward, block, tile.scale, tile.margin, tops, sums, positive, *targets, *columns)
        state = [part.double() for part in run.merge(tops, sums, tile.scale)]
        if one_positive:
            state += [positive.double() * tile.scale, torch.ones_like(state[0])]
        else:
            scores, counts = (part.sum(0, dtype=torch.float64) for part in targets)
            state += [scores * tile.scale, counts]
        self.rows.append(state)
        if tile.symmetric:
            self.column_state = run.merge(*columns, tile.scale, self.column_state)

    def result(self):
        columns = [part.double() for part in self.column_state] if self.tile.symmetric else []
        return joined(self.rows) + columns


class _LossForward:
    """Kinds whose state is `parts` sums over each row."""

    def __init__(self, tile, run):
        self.tile, self.run, self.rows = tile, run, []
        self.parts = 2 if tile.kind == "sigmoid" else 1
        self.per_tile = 4 * run.size * self.parts

    def add(self, block, weights=None, panel=None):
        sums = [self.run.row_partials(block) for _ in range(self.parts)]
        _elementwise(self.tile, self.run, block, sums, weights, panel)
        self.rows.append([part.sum(0, dtype=torch.float64) for part in sums])

    def result(self):
        return joined(self.rows)


def _elementwise(tile, run, block, sums, weights, panel):
    if tile.kind == "sigmoid":
        numbers = tile.scale, tile.bias
        run(operators().sigmoid, block, *numbers, *(sums or (None, None)), weights, panel)
    else:
        run(operators().squared_error, block, *(sums or (None,)), weights, panel)


class _LevelsForward:
    def __init__(self, tile, run):
        self.tile, self.run, self.levels = tile, run, tile.levels.float()
        count = self.levels.numel()
        self.per_tile = 16 * count
        self.top = self.levels.new_full((2, count), EMPTY, dtype=torch.float64)
        self.sum = torch.zeros_like(self.top)

    def add(self, block):
        run, scale = self.run, self.tile.scale
        tile_rows, tile_columns = run.tiles(block)
        out = run.empty(tile_rows * tile_columns, 2, 2, self.levels.numel())
        run(operators().levels_forward, block, scale, self.levels, out)
        partials = out.double().unbind(2)
        self.top, self.sum = with_partials(self.top, self.sum, *partials, scale)

    def result(self):
        return [self.top, self.sum]


def _softmax_score_grad(tile, run, block, coefficients, panel):
    run(operators().softmax_score_grad, block, tile.scale, tile.margin, *coefficients, panel)


def _elementwise_score_grad(tile, run, block, coefficients, panel):
    _elementwise(tile, run, block, None, coefficients[0], panel)


def _levels_score_grad(tile, run, block, coefficients, panel):
    levels = tile.levels.float()
    run(operators().levels_score_grad, block, tile.scale, levels, *coefficients, panel)


_FORWARDS = {
    "softmax": _SoftmaxForward,
    "sigmoid": _LossForward,
    "squared_error": _LossForward,
    "levels": _LevelsForward,
}
_SCORE_GRADS = {
    "softmax": _softmax_score_grad,
    "sigmoid": _elementwise_score_grad,
    "squared_error": _elementwise_score_grad,
    "levels": _levels_score_grad,
}

KINDS = {*_FORWARDS, "closest"}


# ---- selection and lists ----


def paired_scores(unit_x, unit_y):
    """Scores (N,) of paired rows by the same products as the tiles, so that equal rows tie."""
    out = unit_x.new_empty(unit_x.shape[0], dtype=torch.float32)
    # Rows that were gathered have lost their padding.
    padded = operand(unit_y, unit_y.dtype)
    operators().diagonal(unit_x, padded, product(unit_x.dtype), out, stream(unit_x))
    return out


def check_closest(pairs):
    """RuntimeError for pairs that the kernels of the closest negative do not support."""
    check_known(pairs, "the closest negative")
    if pairs.positives is None or pairs.row_groups is not None:
        refuse("its closest negatives need positives, and take no groups")


def closest(pairs, semi_hard, unit_x, unit_y, ceilings):
    """The column (N,) of each row's closest negative, -1 if it has none."""
    check_closest(pairs)
    run = Launch(pairs, unit_x, unit_y)
    ceiling = None
    if semi_hard:
        ceiling = paired_scores(unit_x, unit_y[pairs.positives]) if ceilings is None else ceilings
    chosen = []
    for block in run.bands(8 * run.size):
        top = run.row_partials(block)
        column = torch.empty_like(top, dtype=torch.int32)
        limit = None if ceiling is None else ceiling[block[0]]
        run(operators().closest, block, limit, top, column)
        best = top.amax(0)
        first = torch.where(top == best, column, torch.iinfo(torch.int32).max).amin(0)
        chosen.append(torch.where(best > EMPTY, first, -1).long())
    return torch.cat(chosen)


def running_sums(logits):
    """Running log-sum-exps (2, M), float64: of logits (M,) forward, of their negatives backward."""
    scratch = logits.new_empty(2, operators().scan_parts(len(logits)), 2, dtype=torch.float64)
    out = logits.new_empty(2, len(logits), dtype=torch.float64)
    operators().scan(logits, scratch, out, stream(logits))
    return out

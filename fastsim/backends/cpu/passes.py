"""The forward pass and the score gradients of each kind of loss, by the CPU operators.

A forward pass adds one panel after the other to the state (`add`). For a panel of whole rows,
`fused_pass` also replaces the scores by score gradients. A sweep over prefixes passes the panels of
all widths at once; all tensors over rows or columns then have a first dimension for the widths.
"""

import torch

from fastsim.kinds import KINDS
from fastsim.kinds.kind import EMPTY, with_partials

_LIBRARY = torch.ops.fastsim_cpu


class Operators:
    """The operators `<prefix>_<kernel>`, by the names of the kernels.

    arguments: the arguments that all of them take, between the panels and those of each operator.
    """

    def __init__(self, prefix, *arguments):
        self._prefix, self._arguments = prefix, arguments

    def __getattr__(self, kernel):
        operator = getattr(_LIBRARY, f"{self._prefix}_{kernel}")
        return lambda panels, *rest: operator(panels, *self._arguments, *rest)


def pair_arguments(pairs, block, targets=None, row_metrics=None):
    """The arguments about pairs that every panel operator takes.

    targets: a panel of targets. row_metrics: as in `TileLoss`, for the first operator that reduces
    the rows of a block; None for later ones.
    """
    rows, columns = block
    *parts, dense = pairs.block(rows, columns)
    parts.append(dense if targets is None else targets)
    parts += pairs.negative_target, pairs.skip, None if row_metrics is None else row_metrics[rows]
    return rows.start + pairs.offset, columns.start, *parts


def state_of(*shape, fill=0.0):
    """A tensor of a state, float64 whatever the dtype of the rows."""
    return torch.full(shape, fill, dtype=torch.float64, device="cpu")


def in_type(dtype, coefficients):
    return [None if c is None else c.to(dtype) for c in coefficients]


class _SoftmaxForward:
    library = _LIBRARY  # the operators; a sweep and `Mirrored` set others

    def __init__(self, tile, rows, columns, widths=()):
        self.tile = tile
        tops, *sums = (state_of(*widths, rows, fill=fill) for fill in (EMPTY, 0.0, 0.0, 0.0))
        self.rows = (tops, *sums)
        self.columns = ()
        if tile.symmetric:
            self.columns = state_of(*widths, columns, fill=EMPTY), state_of(*widths, columns)

    def add(self, panel, pairs, block):
        rows, columns = block
        tile = self.tile
        self.library.softmax_forward(
            panel,
            *pairs,
            tile.scale,
            tile.margin,
            *(state[..., rows] for state in self.rows),
        )
        if tile.symmetric:
            column_state = (state[..., columns] for state in self.columns)
            self.library.softmax_forward_columns(panel, *pairs, tile.scale, *column_state)

    def fused_pass(self, panel, pairs, weights):
        tile = self.tile
        if tile.pairs.untargeted:
            everything = slice(None), slice(None)
            self.add(panel, pairs, everything)
            coefficients = in_type(panel.dtype, tile.coefficients(self.result(), weights.double()))
            _softmax_score_grad(tile, panel, pairs, everything, coefficients)
            return
        self.library.softmax_fused(
            panel, *pairs, tile.scale, tile.margin, tile.normalise, weights, *self.rows
        )

    def result(self):
        return [*self.rows, *self.columns]


class _SigmoidForward:
    library = _LIBRARY

    def __init__(self, tile, rows, columns, widths=()):
        self.tile = tile
        self.state = [state_of(*widths, rows), state_of(*widths, rows)]

    def add(self, panel, pairs, block):
        tile, state = self.tile.of_rows(block[0]), (state[..., block[0]] for state in self.state)
        _sigmoid(tile, panel, pairs, None, *state, self.library)

    def fused_pass(self, panel, pairs, weights):
        _sigmoid(self.tile, panel, pairs, weights, *self.state, self.library)

    def result(self):
        return self.state


def _sigmoid(tile, panel, pairs, weights, losses, score_grads, library):
    """tile: restricted to the rows of the panel (`TileLoss.of_rows`)."""
    library.sigmoid(
        panel,
        *pairs,
        tile.scale,
        tile.bias,
        weights,
        losses,
        score_grads,
        tile.positive_weights,
    )


class _SquaredErrorForward:
    library = _LIBRARY

    def __init__(self, tile, rows, columns, widths=()):
        self.losses = state_of(*widths, rows)

    def add(self, panel, pairs, block):
        self.library.squared_error(panel, *pairs, None, self.losses[..., block[0]])

    def fused_pass(self, panel, pairs, weights):
        self.library.squared_error(panel, *pairs, weights, self.losses)

    def result(self):
        return [self.losses]


class _RowsForward:
    """A kind with a state of rows alone, and the operators <kind>_forward and <kind>_score_grad."""

    library = _LIBRARY

    def __init__(self, tile, rows, columns):
        self.tile = tile
        self.state = [state_of(rows, fill=fill) for part in tile.parts for fill in part.fills]
        self.known = False

    def know(self, sums):
        """Sets the maxima and sums of the negatives over all columns; `add` then adds the terms of
        the positives alone.
        """
        self.known = True
        self.state[:2] = sums

    def add(self, panel, pairs, block):
        self._run(panel, pairs, [state[block[0]] for state in self.state])

    def fused_pass(self, panel, pairs, weights):
        self._run(panel, pairs, self.state)
        coefficients = in_type(panel.dtype, self.tile.coefficients(self.state, weights.double()))
        _rows_score_grad(self.tile, panel, pairs, (slice(None), None), coefficients)

    def _run(self, panel, pairs, state):
        forward = getattr(self.library, f"{self.tile.kind}_forward")
        known = (self.known,) if self.tile.whole_rows else ()
        forward(panel, *pairs, *_parameters(self.tile), *known, *state)

    def result(self):
        return self.state


class _DebiasedForward(_RowsForward):
    """Sums of exponentials of negatives and positives, by the kernels of multi-similarity.

    With hardness it also sums the exponentials of negatives at a second scale.
    """

    def fused_pass(self, panel, pairs, weights):
        self._run(panel, pairs, self.state)
        coefficients = in_type(panel.dtype, self.tile.coefficients(self.state, weights.double()))
        _debiased_score_grad(self.tile, panel, pairs, (slice(None), None), coefficients)

    def _run(self, panel, pairs, state):
        tile, forward = self.tile, self.library.multi_similarity_forward
        forward(panel, *pairs, tile.hard_scale, tile.scale, *state[:4])
        if tile.hardness:
            unused = state_of(len(state[0]), fill=EMPTY), state_of(len(state[0]))
            *pairs, _ = pairs  # without row metrics, which the first call has recorded
            forward(panel, *pairs, None, tile.weight_scale, tile.scale, *state[4:], *unused)


class _LevelsForward:
    def __init__(self, tile, rows, columns):
        self.tile = tile
        count = tile.levels.numel()
        self.top, self.sum = state_of(2, count, fill=EMPTY), state_of(2, count)

    def add(self, panel, pairs, block):
        tile = self.tile
        partial = state_of(panel.shape[0], 2, 2, tile.levels.numel())
        partial[:, :, 0].fill_(EMPTY)
        torch.ops.fastsim_cpu.levels_forward(panel, *pairs, tile.scale, tile.levels, partial)
        self.top, self.sum = with_partials(self.top, self.sum, *partial.unbind(2), tile.scale)

    def result(self):
        return [self.top, self.sum]


def _softmax_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    rows, columns = block
    row_top, row_weight, target_weight, column_top, column_weight = coefficients
    library.softmax_score_grad(
        panel,
        *pairs,
        tile.scale,
        tile.margin,
        row_top[..., rows],
        row_weight[..., rows],
        target_weight[..., rows],
        None if column_top is None else column_top[..., columns],
        None if column_weight is None else column_weight[..., columns],
    )


def _sigmoid_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    weights = coefficients[0][..., block[0]]
    losses, score_grads = state_of(*weights.shape), state_of(*weights.shape)
    tile = tile.of_rows(block[0])
    _sigmoid(tile, panel, pairs, weights, losses, score_grads, library)


def _squared_error_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    weights = coefficients[0][..., block[0]]
    library.squared_error(panel, *pairs, weights, state_of(*weights.shape))


def _parameters(tile):
    return [getattr(tile, name) for name in tile.record.parameters]


def _rows_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    score_grad = getattr(library, f"{tile.kind}_score_grad")
    score_grad(panel, *pairs, *_parameters(tile), *(c[block[0]] for c in coefficients))


def _debiased_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    score_grad = library.multi_similarity_score_grad
    *sums, weight_top, weight = (c if c is None else c[block[0]] for c in coefficients)
    second = panel.clone() if tile.hardness else None
    score_grad(panel, *pairs, tile.hard_scale, tile.scale, *sums)
    if tile.hardness:
        zeros = torch.zeros_like(weight)
        score_grad(second, *pairs, tile.weight_scale, tile.scale, weight_top, weight, zeros, zeros)
        panel.sub_(second)


def _levels_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    library.levels_score_grad(panel, *pairs, tile.scale, tile.levels, *coefficients)


# The kinds whose operators take other arguments than `_RowsForward` passes. Any other kind needs no
# entry: its operators are named after it.
FORWARDS = {
    "softmax": _SoftmaxForward,
    "sigmoid": _SigmoidForward,
    "squared_error": _SquaredErrorForward,
    "debiased": _DebiasedForward,
    "levels": _LevelsForward,
}
SCORE_GRADS = {
    "softmax": _softmax_score_grad,
    "sigmoid": _sigmoid_score_grad,
    "squared_error": _squared_error_score_grad,
    "debiased": _debiased_score_grad,
    "levels": _levels_score_grad,
}


def served():
    """The names of the kinds that have operators."""
    library = torch.ops.fastsim_cpu
    return {name for name in KINDS if name in FORWARDS or hasattr(library, f"{name}_forward")}


def forward_of(tile, rows, columns):
    """The forward pass of this many rows and columns, with an empty state."""
    return FORWARDS.get(tile.kind, _RowsForward)(tile, rows, columns)


def sweep_of(tile, rows, columns, widths, library):
    """`forward_of` for this many widths. library: the operators of the sweep."""
    state = FORWARDS[tile.kind](tile, rows, columns, (widths,))
    state.library = library
    return state


def write_score_grad(tile, panel, pairs, block, coefficients, library=_LIBRARY):
    """Replaces the scores of a block by the score gradients."""
    SCORE_GRADS.get(tile.kind, _rows_score_grad)(tile, panel, pairs, block, coefficients, library)

"""A tile loss as the engine sees it: its kind, its pairs and its parameters."""

from dataclasses import dataclass, replace

import torch

from fastsim.collectives import all_reduce_sum
from fastsim.kinds import KINDS
from fastsim.kinds.kind import COLUMNS, MATRIX, ROWS
from fastsim.pairs import Pairs
from fastsim.precision import compute_dtype, wide_dtype


@dataclass(frozen=True)
class TileLoss:
    """Which loss is computed over the scores s of x (N, D) and y (M, D).

    kind: the name of a record in `fastsim.kinds`; its formula says what each parameter does.
    pairs: which pairs of a row and a column take part, and as what.
    scale, bias: the logits are z = scale * s + bias. Numbers, or 0-d tensors in the passes.
    margin: subtracted from the scores of positives.
    normalise: whether the targets of a row are divided by their sum.
    symmetric: whether the loss also runs along the columns.
    levels: (K,) the distinct target values, ascending, in the compute type.
    group: the name of the process group whose ranks hold the rows, if the loss keeps a state of
        columns or of the matrix; otherwise "".
    positive_scale: the scale of the logits of positives, for kinds with a second scale.
    cosine: whether scores are cosines; otherwise they are dot products.
    base: the score at which a pair begins to count.
    hardness: how much more a negative with a higher score weighs, in units of the scale.
    prior: (N, 2) for each row the probability that a negative is in fact a positive, and its number
        of negatives; None if no negative is a positive.
    positive_weights: (N,) the weight of each positive pair of a row in an elementwise loss; None
        means 1, the weight of every other pair.
    row_metrics: (N, len(ROW_METRICS)), to which the pass that first computes the scores adds the
        numbers behind `fastsim.metrics`; None outside a `metrics` block.
    """

    kind: str
    pairs: Pairs
    scale: float | torch.Tensor = 1.0
    bias: float | torch.Tensor = 0.0
    margin: float = 0.0
    normalise: bool = False
    symmetric: bool = False
    levels: torch.Tensor | None = None
    group: str = ""
    positive_scale: float = 1.0
    cosine: bool = True
    base: float = 0.0
    hardness: float = 0.0
    prior: torch.Tensor | None = None
    positive_weights: torch.Tensor | None = None
    row_metrics: torch.Tensor | None = None

    @property
    def record(self):
        """The record of its kind."""
        return KINDS[self.kind]

    @property
    def parts(self):
        """The parts of the state, in order."""
        return self.record.parts(self)

    @property
    def hard_scale(self):
        """The scale of the exponentials of negatives that are weighted by hardness."""
        return self.scale * (1 + self.hardness)

    @property
    def weight_scale(self):
        """The scale of the exponentials that are these weights."""
        return self.scale * self.hardness

    def of_rows(self, rows):
        """The tile with its values of each row cut to a slice; `pairs` is not cut."""
        held = {"prior": self.prior, "positive_weights": self.positive_weights}
        cut = {name: values[rows] for name, values in held.items() if values is not None}
        return replace(self, **cut) if cut else self

    @property
    def by_index(self):
        """Whether indices alone say which pairs take part and as what: there is no matrix of
        targets, no bias, no weight of positives and no slice of the pairs.
        """
        pairs = self.pairs
        indexed = pairs.plain and pairs.dense is None and not pairs.sliced
        return indexed and pairs.skip != "lower" and self.positive_weights is None

    @property
    def rows_alone(self):
        """Whether the score gradient of a pair depends on the scores of its row alone, not on those
        of its column or of the whole matrix.
        """
        return all(part.axis == ROWS for part in self.parts)

    @property
    def whole_rows(self):
        """Whether the forward pass needs a whole row at once, as some terms need its sums."""
        return any(part.needs_row for part in self.parts)

    # ---- the state ----

    def state_shapes(self, rows, columns):
        """The shapes of the state's tensors."""
        levels = 0 if self.levels is None else self.levels.shape[0]
        shapes = {ROWS: (rows,), COLUMNS: (columns,), MATRIX: (2, levels)}
        return [shapes[part.axis] for part in self.parts for _ in range(part.size)]

    def empty_state(self, rows, columns, device):
        """The state before the first score."""
        fills = [fill for part in self.parts for fill in part.fills]
        shapes = self.state_shapes(rows, columns)
        return [
            torch.full(shape, fill, dtype=wide_dtype(device), device=device)
            for shape, fill in zip(shapes, fills, strict=True)
        ]

    def split(self, state):
        """(the tensors of rows and of the matrix, the tensors of columns) of a state."""
        mine, of_columns = [], []
        for part, tensors in by_part(self.parts, state):
            (of_columns if part.axis == COLUMNS else mine).extend(tensors)
        return mine, of_columns

    def merge(self, parts, state, more):
        """The tensors of these parts over the scores of both states; `state` came first."""
        both = zip(by_part(parts, state), by_part(parts, more), strict=True)
        return [t for (part, one), (_, other) in both for t in part.merge(self, one, other)]

    def all_reduce(self, state, axes=(COLUMNS, MATRIX)):
        """The state, its parts along these axes merged over the ranks of the group."""
        if not self.group:
            return state
        merged = []
        for part, tensors in by_part(self.parts, state):
            merged += part.all_reduce(self, tensors) if part.axis in axes else tensors
        return merged

    # ---- losses and gradients ----

    def finish(self, state):
        """The losses (N,), or () for a loss over the whole matrix.

        For a softmax without targets the log-sum-exps (N,), if symmetric (N + M,) with those of the
        columns.
        """
        return self.record.finish(self, state)

    def loss_shape(self, rows, columns):
        """The shape of what `finish` returns."""
        return self.record.loss_shape(self, rows, columns)

    def loss_dtype(self, x):
        """The dtype of the losses for rows x: the compute type, or the type of sums for
        log-sum-exps, which the caller merges further.
        """
        if self.pairs.untargeted:
            return wide_dtype(x.device)
        return compute_dtype(x)

    def own_gradient(self, grad):
        """dL/dloss on this rank -> the sum over ranks, for a loss () over the whole matrix.

        Each rank then holds the same loss, so its gradient is the sum of theirs. The losses of rows
        belong to one rank, and their gradient stays as it is.
        """
        return all_reduce_sum(grad, self.group) if self.group and self.record.whole_matrix else grad

    def coefficients(self, state, grad):
        """What the score gradient of a pair needs besides its score, for dL/dloss `grad`."""
        return self.record.coefficients(self, state, grad)

    def coefficients_of_block(self, coefficients, block):
        """The coefficients of the rows and columns of a block."""
        rows, columns = block
        parts = {ROWS: rows, COLUMNS: columns, MATRIX: slice(None)}
        axes = zip(coefficients, self.record.coefficient_axes, strict=True)
        return [c if c is None else c[parts[axis]] for c, axis in axes]

    def column_coefficients(self, coefficients):
        """The coefficients of columns."""
        axes = zip(coefficients, self.record.coefficient_axes, strict=True)
        return [c for c, axis in axes if axis == COLUMNS and c is not None]

    def with_column_coefficients(self, coefficients, of_columns):
        """The coefficients with those of columns replaced."""
        others = iter(of_columns)
        axes = zip(coefficients, self.record.coefficient_axes, strict=True)
        return [next(others) if axis == COLUMNS and c is not None else c for c, axis in axes]


def by_part(parts, tensors):
    """Yields (part, its tensors) for each part of a state."""
    at = 0
    for part in parts:
        yield part, list(tensors[at : at + part.size])
        at += part.size

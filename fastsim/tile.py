"""A tile loss: its kind, its pairs and its parameters."""

from dataclasses import dataclass, replace

import torch

from fastsim.collectives import all_reduce_sum
from fastsim.kinds import KINDS
from fastsim.kinds.kind import COLUMNS, MATRIX, ROWS
from fastsim.pairs import Pairs
from fastsim.precision import wide_dtype


@dataclass(frozen=True)
class Tile:
    """A tile loss: its kind, its pairs and its parameters.

    kind: the name of a record of `fastsim.kinds`, whose formula says what the parameters are in it.
    scale, bias: of the logits z = scale * s + bias; numbers, or 0-d tensors in the passes.
    margin: taken from the positives' scores.
    normalise: divide each row's targets by their sum.
    symmetric: along the columns too.
    levels: (K,) ascending distinct target values in the compute type.
    group: the name of the process group whose ranks hold the rows, where the loss keeps more than
        its rows' own state; "" for a loss of one process or of rows alone.
    positive_scale: of the logits of positives, where they have one of their own.
    cosine: the scores are cosines; else the products of the rows as they are.
    base: the score at which a pair begins to count.
    hardness: by how much higher scores weigh more among the negatives, in units of the scale.
    prior: (N, 2) of each row, the probability that a negative is a positive, and how many
        negatives it has; None: no negative is a positive.
    positive_weights: (N,) what each pair of a row and a column of its group counts in an
        elementwise loss; None: 1, as every other pair.
    seen: (N, len(SEEN)), to which what first looks at the scores adds what `fastsim.metrics` are
        made of; None: nobody asks.
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
    seen: torch.Tensor | None = None

    @property
    def record(self):
        """What is known of its kind."""
        return KINDS[self.kind]

    @property
    def parts(self):
        """The parts of the state, in their order."""
        return self.record.parts(self)

    @property
    def hard_scale(self):
        """The scale of the exponentials of weighed negatives."""
        return self.scale * (1 + self.hardness)

    @property
    def weight_scale(self):
        """The scale of the exponentials that are their weights."""
        return self.scale * self.hardness

    def of_rows(self, rows):
        """The tile with what it holds of each row cut to a slice; its pairs stay those of all."""
        held = {"prior": self.prior, "positive_weights": self.positive_weights}
        cut = {name: values[rows] for name, values in held.items() if values is not None}
        return replace(self, **cut) if cut else self

    @property
    def by_index(self):
        """Whether its pairs are told by indices: no matrix of targets, nothing added to scores, no
        weights of positives, every pair of rows and columns.
        """
        pairs = self.pairs
        indexed = pairs.plain and pairs.dense is None and not pairs.sliced
        return indexed and pairs.skip != "lower" and self.positive_weights is None

    @property
    def rows_alone(self):
        """Whether the state is one of rows: the score gradient of a pair depends on its row alone.

        Not on the other scores of its column, nor on the whole matrix.
        """
        return all(part.axis == ROWS for part in self.parts)

    @property
    def whole_rows(self):
        """Whether a forward pass has to see a row at once: some terms need the sums of it."""
        return any(part.needs_row for part in self.parts)

    # ---- the state ----

    def state_shapes(self, rows, columns):
        """The shapes of the state's tensors."""
        levels = 0 if self.levels is None else self.levels.shape[0]
        shapes = {ROWS: (rows,), COLUMNS: (columns,), MATRIX: (2, levels)}
        return [shapes[part.axis] for part in self.parts for _ in range(part.size)]

    def empty_state(self, rows, columns, device):
        """The state before any score has been looked at."""
        fills = [fill for part in self.parts for fill in part.fills]
        shapes = self.state_shapes(rows, columns)
        return [
            torch.full(shape, fill, dtype=wide_dtype(device), device=device)
            for shape, fill in zip(shapes, fills, strict=True)
        ]

    def split(self, state):
        """(the tensors of rows or of the matrix, those of columns)."""
        mine, of_columns = [], []
        for part, tensors in by_part(self.parts, state):
            (of_columns if part.axis == COLUMNS else mine).extend(tensors)
        return mine, of_columns

    def merge(self, parts, state, more):
        """The tensors of these parts over the scores of both; of `state` those seen first."""
        both = zip(by_part(parts, state), by_part(parts, more), strict=True)
        return [t for (part, one), (_, other) in both for t in part.merge(self, one, other)]

    def all_reduce(self, state, axes=(COLUMNS, MATRIX)):
        """The state with that of columns and of the matrix merged over the ranks of the group."""
        if not self.group:
            return state
        merged = []
        for part, tensors in by_part(self.parts, state):
            merged += part.all_reduce(self, tensors) if part.axis in axes else tensors
        return merged

    # ---- losses and gradients ----

    def finish(self, state):
        """The losses (N,), or () for a loss over the whole matrix.

        A softmax without targets: the log-sum-exps (N,), if symmetric of the columns too (N + M,).
        """
        return self.record.finish(self, state)

    def loss_shape(self, rows, columns):
        """The shape of what `finish` returns."""
        return self.record.loss_shape(self, rows, columns)

    def loss_dtype(self, x):
        """The type of the losses for rows x: the compute type, a wider one of what is to be merged.

        These are log-sum-exps.
        """
        if self.pairs.untargeted:
            return wide_dtype(x.device)
        return torch.promote_types(x.dtype, torch.float32)

    def own_gradient(self, grad):
        """dL/dloss of this rank's loss or losses -> of what its rows are part of.

        The one value of a loss over the whole matrix is that of every rank.
        """
        return all_reduce_sum(grad, self.group) if self.group and self.record.whole_matrix else grad

    def coefficients(self, state, grad):
        """What the score gradient of each pair needs beside its score, for dL/dloss `grad`."""
        return self.record.coefficients(self, state, grad)

    def coefficients_of_block(self, coefficients, block):
        """Those of the rows and columns of a block."""
        rows, columns = block
        parts = {ROWS: rows, COLUMNS: columns, MATRIX: slice(None)}
        axes = zip(coefficients, self.record.coefficient_axes, strict=True)
        return [c if c is None else c[parts[axis]] for c, axis in axes]

    def column_coefficients(self, coefficients):
        """Those of columns."""
        axes = zip(coefficients, self.record.coefficient_axes, strict=True)
        return [c for c, axis in axes if axis == COLUMNS and c is not None]

    def with_column_coefficients(self, coefficients, of_columns):
        """The coefficients with other ones of columns."""
        others = iter(of_columns)
        axes = zip(coefficients, self.record.coefficient_axes, strict=True)
        return [next(others) if axis == COLUMNS and c is not None else c for c, axis in axes]


def by_part(parts, tensors):
    """(part, its tensors) of each part of a state."""
    at = 0
    for part in parts:
        yield part, list(tensors[at : at + part.size])
        at += part.size

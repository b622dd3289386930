"""`Pairs`: which pairs of a row and a column take part, and with which target."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastsim.pairs.guide import Guide


class Factors(NamedTuple):
    """A target matrix t_ij = rows_i . columns_j as its factors; each panel computes its own part.

    rows (N, E), columns (M, E): in the compute type.
    cosine: whether t_ij is the cosine instead. The rows may then have any dtype; they are
        embeddings for an operator, `Backend.scored_rows` of them for a backend.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    cosine: bool = False

    def of_columns(self, part):
        """The factors of a slice of the columns."""
        return self._replace(columns=self.columns[part])


@dataclass(frozen=True)
class Pairs:
    """The target of each pair (i, j), and the pairs that are left out.

    One of these four defines the target t_ij. Without any, a softmax returns its log-sum-exps.
        positives: (N,) 1 if j == positives[i], else 0; without groups.
        row_groups, column_groups: 1 if row_groups[i] == column_groups[j], else `negative_target`.
        dense: (N, M) dense[i, j], in its own dtype.
        factors: a matrix in two factors, see `Factors`.

    A pair is left out
        by skip: "diagonal" if j == i, "lower" if j <= i (each unordered pair once), where row i
            counts as i + offset;
        by row_ids, column_ids: if row_ids[i] == column_ids[j] and j != positives[i];
        by exclude_above: if its score exceeds the score of the positive by more than that;
        by guide: if the guide says so and j != positives[i].

    column_bias: (M,) in the compute type, added to the logits of a column.
    row_shift: (N,) in the compute type, subtracted from the scores of a row.
    thresholds: (N,) in the compute type, the scores of the positives plus `exclude_above`
        (`with_thresholds`).
    distinct: whether it is known that no two rows have the same positive.
    sliced: whether the columns are a slice of all, so that a positive may lie outside.
    """

    positives: torch.Tensor | None = None
    row_ids: torch.Tensor | None = None
    column_ids: torch.Tensor | None = None
    row_groups: torch.Tensor | None = None
    column_groups: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    negative_target: float = -1.0
    skip: str = "nothing"
    offset: int = 0
    exclude_above: float | None = None
    guide: Guide | None = None
    column_bias: torch.Tensor | None = None
    row_shift: torch.Tensor | None = None
    thresholds: torch.Tensor | None = None
    distinct: bool = False
    sliced: bool = False
    factors: Factors | None = None

    def tensors(self):
        """The tensors over rows, columns and pairs, in the order that every kernel takes them."""
        return (
            self.positives,
            self.row_ids,
            self.column_ids,
            self.row_groups,
            self.column_groups,
            self.dense,
        )

    @property
    def one_positive(self):
        """Whether the only target of each row is its one positive."""
        return self.positives is not None and self.row_groups is None and self.dense is None

    @property
    def untargeted(self):
        """Whether no pair has a target."""
        indexed = self.positives is not None or self.row_groups is not None
        return not indexed and self.dense is None and self.factors is None

    @property
    def plain(self):
        """Whether there are targets, in indices or a matrix; no pair is left out because of a
        score; no score is shifted; and rows count from 0.
        """
        by_score = self.guide is not None or self.exclude_above is not None
        shifted = self.column_bias is not None or self.row_shift is not None
        factored = self.factors is not None
        return not (by_score or shifted or factored or self.offset or self.untargeted)

    @property
    def each_once(self):
        """Whether pairs with j <= i are left out, so that blocks below the diagonal may be, too."""
        return self.skip == "lower" and self.offset == 0

    def of_columns(self, columns):
        """The pairs with a slice of the columns, whose indices then start at 0."""
        positives, _, ids, _, groups, dense = self.block(slice(None), columns)
        return replace(
            self,
            positives=None if positives is None else positives - columns.start,
            column_ids=ids,
            column_groups=groups,
            dense=dense,
            offset=self.offset - columns.start,
            guide=self.guide and self.guide.of_columns(columns),
            factors=self.factors and self.factors.of_columns(columns),
            column_bias=None if self.column_bias is None else self.column_bias[columns],
            sliced=True,
        )

    def score_bias(self, columns, scale):
        """(C,) the bias of a slice of the columns in units of the score: bias / scale."""
        return self.column_bias[columns] / scale

    def block(self, rows, columns):
        """`tensors` for the rows and columns of two slices; `positives` keeps global columns."""
        dense = self.dense
        return (
            part_of(self.positives, rows),
            part_of(self.row_ids, rows),
            part_of(self.column_ids, columns),
            part_of(self.row_groups, rows),
            part_of(self.column_groups, columns),
            None if dense is None else dense[rows, columns],
        )


def part_of(values, part):
    """values[part], without the cost of slicing if the slice is everything. None stays None."""
    if values is None or part == slice(0, values.shape[0]):
        return values
    return values[part]

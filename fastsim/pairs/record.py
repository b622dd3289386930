"""`Pairs`: the target of each pair, and which pairs are left out."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastsim.pairs.guide import Guide


class Factors(NamedTuple):
    """A target matrix as a product: t_ij = rows_i . columns_j, made where a panel wants it.

    rows (N, E), columns (M, E): in the compute type. cosine: of any dtype, and t_ij is the cosine;
        embeddings at the operators, rows of `Backend.scored_rows` for a backend.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    cosine: bool = False

    def of_columns(self, part):
        """Those of a slice of the columns."""
        return self._replace(columns=self.columns[part])


@dataclass(frozen=True)
class Pairs:
    """The target of each pair and the pairs that take no part.

    At most one of `positives` alone, groups, `dense` or `factors` gives the target t_ij; without
    any, a softmax is asked for its log-sum-exps alone:
    positives: 1 at column positives[i], else 0.
    groups: 1 where row_groups[i] == column_groups[j], else `negative_target`.
    dense: dense[i, j], in its own dtype.
    factors: the product of `Factors`, which has no matrix.

    Left out: `skip` "diagonal" (j == i) or "lower" (j <= i: each unordered pair once), where row
    i counts as i + offset; pairs with row_ids[i] == column_ids[j] unless j == positives[i]; pairs
    whose score is more than `exclude_above` over the positive's; and pairs that `guide` decides
    against, unless j == positives[i].

    column_bias: (M,) in the compute type, what is added to the logits of a column.
    row_shift: (N,) in the compute type, what is taken from the scores of a row.
    thresholds: (N,) in the compute type, what `exclude_above` comes to with the positives' scores
        (`with_thresholds`): pairs of row i whose score is above thresholds[i] are out.
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
        """What decides targets and parts by index, in the order that every kernel takes it."""
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
        """Whether each row's only target is its positive."""
        return self.positives is not None and self.row_groups is None and self.dense is None

    @property
    def untargeted(self):
        """Whether no pair has a target."""
        indexed = self.positives is not None or self.row_groups is not None
        return not indexed and self.dense is None and self.factors is None

    @property
    def plain(self):
        """Whether indices or a matrix tell every pair's part and target, some pair has one, and
        scores are taken as they are.
        """
        guided = self.guide is not None or self.exclude_above is not None
        moved = self.column_bias is not None or self.row_shift is not None
        made = self.factors is not None
        return not (guided or moved or made or self.offset or self.untargeted)

    @property
    def each_once(self):
        """Whether the pairs with j <= i are out: blocks below the diagonal may be skipped."""
        return self.skip == "lower" and self.offset == 0

    def of_columns(self, columns):
        """The pairs with a slice of the columns, which then count from 0."""
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
        """(C,) what the bias of a slice of the columns adds to scores whose logits are scale s."""
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
    """values[part] of a slice; of all of them the values themselves, since to slice takes time.

    None stays None.
    """
    if values is None or part == slice(0, values.shape[0]):
        return values
    return values[part]

"""Which pairs are positive, negative or left out, without an N x M matrix unless it was given.

A tile loss looks at the score of row i and column j and asks: does the pair take part, and what
is its target? `Pairs` holds the answer in its smallest form; every backend decides it per tile.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastsim.checks import (
    FLOATING,
    INTEGRAL,
    check_alike,
    check_bias,
    check_choice,
    check_embeddings,
    check_integers,
    check_range,
    check_scores,
    check_tensor,
)
from fastsim.precision import widened

SKIPS = ("nothing", "diagonal", "lower")


@dataclass(frozen=True)
class Guide:
    """Other embeddings that decide: out with (i, j) where their cosine is above thresholds[i].

    rows (N, E), columns (M, E): embeddings at the operators, their unit rows for a backend.
    thresholds (N,) in the compute type.
    scores: (N, M) all cosines, where thresholds were made of these; else a backend makes them by
        the products that made the thresholds, so that the copy of a pair ties with it.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    thresholds: torch.Tensor
    scores: torch.Tensor | None = None

    def of_columns(self, part):
        """The guide of a slice of the columns."""
        return replace(self, columns=self.columns[part])


class Factors(NamedTuple):
    """A target matrix as a product: t_ij = rows_i . columns_j, made where a panel wants it.

    rows (N, E), columns (M, E), in the compute type.
    """

    rows: torch.Tensor
    columns: torch.Tensor

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
        """Whether rows and columns are the same and every unordered pair counts once."""
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


def as_ids(integers):
    """Ids of rows or columns as the backends read them."""
    return integers.to(torch.int64).contiguous()


def part_of(values, part):
    """values[part] of a slice; of all of them the values themselves, since to slice takes time.

    None stays None.
    """
    if values is None or part == slice(0, values.shape[0]):
        return values
    return values[part]


def parse_positives(positives, rows, columns, device):
    """`positives` as (N,) int64 columns, `arange(N)` by default."""
    if positives is None:
        return torch.arange(rows, device=device)
    check_integers("positives", positives, rows, device)
    check_range("positives", positives, columns)
    return as_ids(positives)


def parse_exclude(exclude, rows, columns, device):
    """`exclude=(row_ids, column_ids)` as two int64 tensors, or two Nones."""
    if exclude is None:
        return None, None
    row_ids, column_ids = _two("exclude", exclude, "row_ids, column_ids")
    check_integers("exclude[0]", row_ids, rows, device)
    check_integers("exclude[1]", column_ids, columns, device)
    return as_ids(row_ids), as_ids(column_ids)


def parse_bias(bias, columns, x):
    """`candidate_bias` of a loss in the compute type of its embeddings x, or None."""
    check_bias("candidate_bias", bias, columns, x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return None if bias is None else bias.to(dtype).contiguous()


def parse_targets(targets, rows, columns, device, *, skip="nothing"):
    """A loss's `targets` argument as `Pairs`: a matrix, two group vectors, or None (diagonal)."""
    if targets is None:
        groups = torch.arange(max(rows, columns), device=device)
        return Pairs(row_groups=groups[:rows], column_groups=groups[:columns], skip=skip)
    if isinstance(targets, (tuple, list)):
        row_groups, column_groups = _two("targets", targets, "row_groups, column_groups")
        check_integers("targets[0]", row_groups, rows, device)
        check_integers("targets[1]", column_groups, columns, device)
        row_groups, column_groups = as_ids(row_groups), as_ids(column_groups)
        return Pairs(row_groups=row_groups, column_groups=column_groups, skip=skip)
    dtypes = (*FLOATING, *INTEGRAL)
    what = "a real or integer matrix"
    check_tensor("targets", targets, ndim=2, dtypes=dtypes, what=what, empty=rows == 0)
    if targets.shape != (rows, columns):
        raise ValueError(
            f"targets: wanted shape {(rows, columns)} as the scores, got {tuple(targets.shape)}"
        )
    if targets.device != device:
        raise ValueError(f"targets: wanted device {device}, got {targets.device}")
    if targets.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "targets: wanted a tensor that asks for no gradient, since none reaches it,"
            " got requires_grad=True (targets.detach() has it not)"
        )
    return Pairs(dense=targets, skip=skip)


def parse_groups(embeddings, groups, references, reference_groups, own_first, *, empty=False):
    """Embeddings with groups against references with theirs, or against themselves, as `Pairs`.

    Targets 1 for the same group, else 0. own_first: the first rows of the references are the
    embeddings' own; row i leaves out column i, as it does where there are no references.
    """
    check_embeddings("embeddings", embeddings, empty=empty)
    if (references is None) != (reference_groups is None):
        raise ValueError("references: wanted together with reference_groups, got one of them")
    columns = embeddings.shape[0]
    if references is not None:
        check_embeddings("references", references, empty=empty)
        check_alike("references", references, "embeddings", embeddings)
        columns = references.shape[0]
    shape = embeddings.shape[0], columns
    return _grouped(shape, groups, reference_groups, own_first, embeddings.device)


def groups_of_scores(scores, groups, reference_groups, own_first):
    """`parse_groups` for scores (N, M); without reference_groups (N, N)."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    if reference_groups is None and rows != columns:
        raise ValueError(f"scores: wanted a square matrix, got shape {(rows, columns)}")
    return _grouped(scores.shape, groups, reference_groups, own_first, scores.device)


def _grouped(shape, groups, reference_groups, own_first, device):
    rows, columns = shape
    check_choice("own_first", own_first, (False, True))
    check_integers("groups", groups, rows, device)
    groups = column_groups = as_ids(groups)
    if reference_groups is not None:
        check_integers("reference_groups", reference_groups, columns, device)
        column_groups = as_ids(reference_groups)
        if own_first and columns < rows:
            raise ValueError(
                f"references: wanted at least {rows} rows with own_first, got {columns}"
            )
    skip = "diagonal" if own_first or reference_groups is None else "nothing"
    return Pairs(row_groups=groups, column_groups=column_groups, negative_target=0.0, skip=skip)


def positive_counts(pairs):
    """(N,) int64: how many columns of its own group each row has, itself left out where skipped."""
    groups = pairs.column_groups.sort().values
    first = torch.searchsorted(groups, pairs.row_groups)
    counts = torch.searchsorted(groups, pairs.row_groups, right=True) - first
    if pairs.skip == "diagonal":
        own = pairs.column_groups[pairs.offset :][: pairs.row_groups.shape[0]]
        counts = counts - (own == pairs.row_groups).long()
    return counts


def negative_counts(pairs, columns):
    """(N,) int64: how many of the columns are negatives of each row with its one positive."""
    counts = torch.full_like(pairs.positives, columns - 1)
    if pairs.row_ids is None:
        return counts
    ids = pairs.column_ids.sort().values
    first = torch.searchsorted(ids, pairs.row_ids)
    equal = torch.searchsorted(ids, pairs.row_ids, right=True) - first
    # The positive has its own id among them when its column carries the row's id.
    return counts - equal + (pairs.column_ids[pairs.positives] == pairs.row_ids)


def check_own_targets(targets, x, y, group):
    """A rank's targets, as far as they can be checked before the ranks have met."""
    if group is None or targets is None:
        return
    dense = isinstance(targets, torch.Tensor) and targets.dim() == 2
    parse_targets(targets, len(x), targets.shape[1] if dense else len(y), x.device)


def global_positives(positives, batch):
    """The rank's `parse_positives` among its own columns -> among the columns of all ranks."""
    return positives if batch.group is None else positives + batch.first_column


def global_exclude(ids, batch):
    """The rank's `parse_exclude` -> with the columns of all ranks."""
    row_ids, column_ids = ids
    return row_ids, batch.gather_columns(column_ids)


def global_targets(targets, batch, device):
    """A loss's `targets` of the rank's own rows and columns -> with the columns of all ranks."""
    if batch.group is None:
        return targets
    rows, columns = batch.row_counts[batch.rank], batch.column_counts[batch.rank]
    if targets is None:
        # Groups of a row and its column, which no two ranks have in common.
        groups = torch.arange(max(rows, columns), device=device) + (batch.rank << 40)
        targets = groups[:rows], groups[:columns]
    if isinstance(targets, torch.Tensor):
        return targets
    pairs = parse_targets(targets, rows, columns, device)
    return pairs.row_groups, batch.gather_columns(pairs.column_groups)


def global_groups(pairs, batch):
    """`parse_groups` of the rank's own rows and columns -> with the columns of all ranks."""
    if batch.group is None:
        return pairs
    groups = batch.gather_columns(pairs.column_groups)
    return replace(pairs, column_groups=groups, offset=batch.first_column)


def gather_targets(targets, batch):
    """What `global_targets` returned -> with the rows of all ranks too."""
    if isinstance(targets, tuple):
        return batch.gather_rows(targets[0]), targets[1]
    return batch.gather_rows(targets)


def dense_targets(pairs, rows, columns, dtype, device):
    """The (N, M) target matrix of `pairs`, for the dense specifications."""
    if pairs.dense is not None:
        return pairs.dense.to(dtype)
    if pairs.row_groups is not None:
        same = pairs.row_groups[:, None] == pairs.column_groups[None, :]
        return torch.where(same, 1.0, pairs.negative_target).to(dtype)
    targets = torch.zeros(rows, columns, dtype=dtype, device=device)
    return targets.scatter(1, pairs.positives[:, None], 1.0)


def pair_mask(pairs, rows, columns, device):
    """The (N, M) bool matrix of pairs that take part, for the dense specifications."""
    index = torch.arange(max(rows, columns), device=device)
    row, column = index[:rows, None] + pairs.offset, index[None, :columns]
    part = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if pairs.skip == "diagonal":
        part = row != column
    elif pairs.skip == "lower":
        part = column > row
    if pairs.row_ids is not None:
        same = pairs.row_ids[:, None] == pairs.column_ids[None, :]
        if pairs.positives is not None:
            same = same & (column != pairs.positives[:, None])
        part = part & ~same
    if pairs.guide is not None:
        # In double precision, so that a copy of the pair behind a threshold ties with it.
        sides = (pairs.guide.rows, pairs.guide.columns)
        rows_, columns_ = (torch.nn.functional.normalize(widened(side), dim=1) for side in sides)
        guided = rows_ @ columns_.T
        thresholds = pairs.guide.thresholds[:, None]
        above = guided.to(thresholds.dtype) > thresholds
        if pairs.positives is not None:
            above = above & (column != pairs.positives[:, None])
        part = part & ~above
    return part


def with_thresholds(pairs, unit_x, unit_y, backend):
    """Pairs with the `thresholds` of `exclude_above`: what of each row is out lies above them."""
    if unit_x.shape[0]:
        thresholds = backend.positive_scores(pairs, unit_x, unit_y) + pairs.exclude_above
    else:  # one rank of a group may have no rows
        thresholds = unit_x.new_empty(0)
    return replace(pairs, thresholds=thresholds)


def with_unit_guide(pairs, backend):
    """Pairs with the guide's embeddings as the backend's unit rows."""
    guide = pairs.guide
    if guide is None:
        return pairs
    rows = backend.unit_rows(guide.rows)[0]
    columns = rows if guide.columns is guide.rows else backend.unit_rows(guide.columns)[0]
    return replace(pairs, guide=Guide(rows, columns, guide.thresholds))


def not_above(scores, positives, margin):
    """The (N, M) bool matrix of scores at most `margin` above the row's positive."""
    return scores <= scores.gather(1, positives[:, None]) + margin


def _two(name, value, what):
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: wanted ({what}), got {type(value).__name__} of {value!r:.60}")
    return value

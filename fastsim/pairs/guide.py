"""Embeddings that decide which pairs are left out, and thresholds on scores that do."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Guide:
    """Other embeddings that decide: out with (i, j) where their cosine is above thresholds[i].

    rows (N, E), columns (M, E): embeddings at the operators, their unit rows for a backend.
    thresholds (N,) in the compute type, by the products that a backend makes the cosines by, so
        that the copy of a pair ties with it. None, of a matrix that a backend serves in one call
        (`Backend.whole`): what `margin` and `relative` come to with the cosines of the positives.
    margin, relative: of a positive's cosine c the threshold is c - margin, or c - |c| margin.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    thresholds: torch.Tensor | None
    margin: float = 0.0
    relative: bool = False

    def of_columns(self, part):
        """The guide of a slice of the columns."""
        return replace(self, columns=self.columns[part])


def with_thresholds(pairs, unit_x, unit_y, backend):
    """Pairs with the `thresholds` of `exclude_above`: what of each row is out lies above them."""
    if unit_x.shape[0]:
        thresholds = backend.positive_scores(pairs, unit_x, unit_y) + pairs.exclude_above
    else:  # one rank of a group may have no rows
        thresholds = unit_x.new_empty(0)
    return replace(pairs, thresholds=thresholds)


def with_unit_rows(pairs, backend):
    """Pairs with the embeddings of the guide, and of the factors where cosines are meant, as rows
    whose scores the backend makes.
    """
    guide, factors = pairs.guide, pairs.factors
    if guide is not None:
        rows, columns = _scored(guide.rows, guide.columns, backend)
        pairs = replace(pairs, guide=Guide(rows, columns, guide.thresholds))
    if factors is not None and factors.cosine:
        rows, columns = _scored(factors.rows, factors.columns, backend)
        pairs = replace(pairs, factors=factors._replace(rows=rows, columns=columns))
    return pairs


def _scored(rows, columns, backend):
    unit = backend.scored_rows(rows)
    return unit, unit if columns is rows else backend.scored_rows(columns)

"""Pairs left out by the scores of a guide model, or by thresholds on the scores themselves."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Guide:
    """Embeddings of a guide model: pair (i, j) is left out if their cosine is above thresholds[i].

    rows (N, E), columns (M, E): embeddings for an operator, their unit rows for a backend.
    thresholds: (N,) in the compute type, computed by the same products as the cosines, so that a
        copy of a positive ties with it. None for `Backend.in_one_call`, which computes them from
        the cosines of the positives.
    margin, relative: for a positive with cosine c the threshold is c - margin, or with `relative`
        c - |c| margin.
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
    """`pairs` with thresholds: the scores of the positives plus `exclude_above`."""
    if unit_x.shape[0]:
        thresholds = backend.positive_scores(pairs, unit_x, unit_y) + pairs.exclude_above
    else:  # a rank of a group may have no rows
        thresholds = unit_x.new_empty(0)
    return replace(pairs, thresholds=thresholds)


def with_unit_rows(pairs, backend):
    """`pairs` with `Backend.scored_rows` for its guide, and for its factors if they use cosines."""
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

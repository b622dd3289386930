"""The arguments of the registered operators of a tile loss, as a named tuple."""

from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from fastsim.kinds import KINDS
from fastsim.operators import schema_of
from fastsim.pairs import Factors, Guide, Pairs
from fastsim.tile_loss import TileLoss


class TileArguments(NamedTuple):
    """A tile loss over the scores of x and y. The schema of the operators is made of these fields.

    A field has the meaning of the field of the same name in `TileLoss`, `Pairs`, `Guide`
    (`guide_...`) or `Factors` (`factor_...`). Tensors come first. The others:

    y: None to compare x with itself.
    weights: those of the losses, (N,), or () if all are equal; None asks for the losses themselves.
    with_metrics: whether the operator also returns `TileLoss.row_metrics`, last.
    needs_grad: which of x, y, scale and bias need a gradient.
    backend: its name.
    """

    x: Tensor
    y: Tensor | None
    scale: Tensor
    bias: Tensor
    weights: Tensor | None
    positives: Tensor | None
    row_ids: Tensor | None
    column_ids: Tensor | None
    row_groups: Tensor | None
    column_groups: Tensor | None
    dense: Tensor | None
    guide_rows: Tensor | None
    guide_columns: Tensor | None
    guide_thresholds: Tensor | None
    column_bias: Tensor | None
    row_shift: Tensor | None
    factor_rows: Tensor | None
    factor_columns: Tensor | None
    levels: Tensor | None
    prior: Tensor | None
    positive_weights: Tensor | None
    negative_target: float
    skip: str
    offset: int
    factor_cosine: bool
    exclude_above: float | None
    distinct: bool
    kind: str
    margin: float
    normalise: bool
    symmetric: bool
    group: str
    positive_scale: float
    cosine: bool
    base: float
    hardness: float
    with_metrics: bool
    needs_grad: list[bool]
    backend: str

    # Methods: torch.compile of torch 2.10 does not trace the properties of a named tuple.

    def tensors(self):
        """The fields that are tensors or None."""
        return self[:TENSORS]

    def options(self):
        """The other fields."""
        return self[TENSORS:]

    def finds_gradients(self):
        """Whether the forward pass computes the gradients of the inputs, instead of a state.

        It does if the weights of the losses are known and all scores belong to this process. Sizes
        have no influence: torch.compile has to know what an operator returns before it knows them.
        """
        known = self.weights is not None or KINDS[self.kind].whole_matrix
        return any(self.needs_grad) and known and not self.group

    def tile(self, number):
        """The `TileLoss`; `number` converts its scale and bias, which are 0-d tensors here."""
        named = dict(zip(_PAIRS, _pairs_of(self), strict=True))
        columns = {}
        for of_rows, of_columns in _SHARED:
            value = getattr(self, of_columns)
            columns[of_columns] = getattr(self, of_rows) if value is None else value
        named |= {name: found for name, found in columns.items() if name in named}
        guide = factors = None
        if self.guide_rows is not None:
            guide = Guide(self.guide_rows, columns["guide_columns"], self.guide_thresholds)
        if self.factor_rows is not None:
            columns_of = columns["factor_columns"]
            factors = Factors(self.factor_rows, columns_of, self.factor_cosine)
        return TileLoss(
            pairs=Pairs(**named, guide=guide, factors=factors),
            scale=number(self.scale),
            bias=number(self.bias),
            **dict(zip(_TILE, _tile_of(self), strict=True)),
        )


TENSORS = sum(kind in (Tensor, Tensor | None) for kind in TileArguments.__annotations__.values())
SCHEMA = schema_of(TileArguments)

_PAIRS = tuple(f.name for f in fields(Pairs) if f.name in TileArguments._fields)
_TILE = tuple(
    f.name
    for f in fields(TileLoss)
    if f.name in TileArguments._fields and f.name not in ("scale", "bias")
)
_pairs_of, _tile_of = attrgetter(*_PAIRS), attrgetter(*_TILE)
# If columns and rows share a tensor, that of the columns is None: torch.compile does not trace a
# function that gets the same tensor twice.
_SHARED = (
    ("row_ids", "column_ids"),
    ("row_groups", "column_groups"),
    ("guide_rows", "guide_columns"),
    ("factor_rows", "factor_columns"),
)


def tile_arguments(tile, x, y, scale, bias, weights, needs_grad, backend):
    """The `TileArguments` of a tile; scale and bias replace those of the tile."""
    named = {name: getattr(tile.pairs, name) for name in _PAIRS}
    guide, factors = tile.pairs.guide, tile.pairs.factors
    named |= {
        "guide_rows": None if guide is None else guide.rows,
        "guide_columns": None if guide is None else guide.columns,
        "guide_thresholds": None if guide is None else guide.thresholds,
        "factor_rows": None if factors is None else factors.rows,
        "factor_columns": None if factors is None else factors.columns,
        "factor_cosine": factors is not None and factors.cosine,
    }
    for rows, columns in _SHARED:
        named[columns] = None if named[columns] is named[rows] else named[columns]
    named |= {name: getattr(tile, name) for name in _TILE}
    named |= {
        "with_metrics": tile.row_metrics is not None,
        "needs_grad": needs_grad,
        "backend": backend.name,
    }
    return TileArguments(x, y, scale, bias, weights, **named)

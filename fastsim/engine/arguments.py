"""The arguments of the registered operators of a tile loss, by name."""

from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from fastsim.kinds import KINDS
from fastsim.operators import schema_of
from fastsim.pairs import Factors, Guide, Pairs
from fastsim.tile import Tile


class TileArguments(NamedTuple):
    """A tile loss over the scores of x and y; the schema of the operators is made of these fields.

    Fields named as in `Tile`, `Pairs`, `Guide` (`guide_...`) and `Factors` (`factor_...`) hold what
    those hold. Tensors come first. y: None for x itself. weights: those of the losses, (N,), or ()
    where all are equal; None asks for the losses themselves. observed: whether `Tile.seen` is asked
    for, which is then returned last. wants: which gradients, of x, y, scale and bias. backend: its
    name.
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
    observed: bool
    wants: list[bool]
    backend: str

    # Methods, since torch.compile of torch 2.10 does not trace properties of a named tuple.

    def tensors(self):
        """The fields that are tensors or None."""
        return self[:TENSORS]

    def options(self):
        """The other fields."""
        return self[TENSORS:]

    def finds_gradients(self):
        """Whether the forward pass finds the gradients of the inputs too, rather than a state.

        It does where the weights of the losses are known and every score is this process's own.
        It does not depend on sizes: what the operators return has to be known before sizes are.
        """
        known = self.weights is not None or KINDS[self.kind].whole_matrix
        return any(self.wants) and known and not self.group

    def tile(self, number):
        """The `Tile`, its scale and bias as `number` makes them of 0-d tensors."""
        named = dict(zip(_PAIRS, _pairs_of(self), strict=True))
        columns = {}
        for of_rows, of_columns in _SAME:
            own = getattr(self, of_columns)
            columns[of_columns] = getattr(self, of_rows) if own is None else own
        named |= {name: found for name, found in columns.items() if name in named}
        guide = factors = None
        if self.guide_rows is not None:
            guide = Guide(self.guide_rows, columns["guide_columns"], self.guide_thresholds)
        if self.factor_rows is not None:
            columns_of = columns["factor_columns"]
            factors = Factors(self.factor_rows, columns_of, self.factor_cosine)
        return Tile(
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
    for f in fields(Tile)
    if f.name in TileArguments._fields and f.name not in ("scale", "bias")
)
_pairs_of, _tile_of = attrgetter(*_PAIRS), attrgetter(*_TILE)
# The tensors of columns are None where they are the rows' own: torch.compile does not trace a
# function that is given one tensor twice.
_SAME = (
    ("row_ids", "column_ids"),
    ("row_groups", "column_groups"),
    ("guide_rows", "guide_columns"),
    ("factor_rows", "factor_columns"),
)


def tile_arguments(tile, x, y, scale, bias, weights, wants, backend):
    """The `TileArguments` of a tile, whose own scale and bias are left out."""
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
    for rows, columns in _SAME:
        named[columns] = None if named[columns] is named[rows] else named[columns]
    named |= {name: getattr(tile, name) for name in _TILE}
    named |= {"observed": tile.seen is not None, "wants": wants, "backend": backend.name}
    return TileArguments(x, y, scale, bias, weights, **named)

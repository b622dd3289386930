"""What a loss that is kept for several calls takes from the tensors of each: bias and guide."""

from fastsim.checks import check_bias_numbers, check_constant
from fastsim.pairs import Guide, as_bias
from fastsim.records import replaced


def placeholders(guide, bias, options):
    """(guide, bias) of a `TileLoss`, with empty tensors in the places of those given, or Nones."""
    if guide is not None:
        relative = options["guide_strategy"] == "relative"
        empty = [side.new_empty(0) for side in guide]
        guide = Guide(*empty, None, float(options["guide_margin"]), relative)
    return guide, None if bias is None else bias.new_empty(0)


def with_bias_and_guide(tile, anchors, backend, given):
    """The tile with what `given` holds in these places.

    given: by name; candidate_bias (M,), guide_rows (N, E) and guide_columns (M, E), if present.
    """
    pairs = tile.pairs
    if pairs.column_bias is not None:
        bias = given["candidate_bias"]
        check_constant("candidate_bias", bias)
        bias = as_bias(bias, anchors)
        if not backend.checks_bias:
            check_bias_numbers("candidate_bias", bias)
        pairs = replaced(pairs, column_bias=bias)
    if pairs.guide is not None:
        rows, columns = given["guide_rows"].detach(), given["guide_columns"].detach()
        pairs = replaced(pairs, guide=replaced(pairs.guide, rows=rows, columns=columns))
    return tile if pairs is tile.pairs else replaced(tile, pairs=pairs)


def explain(tile):
    """Raises an error that names the number if a bias is why the backend refused the loss."""
    if tile.pairs.column_bias is not None:
        check_bias_numbers("candidate_bias", tile.pairs.column_bias)

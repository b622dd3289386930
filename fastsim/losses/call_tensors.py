"""What a kept InfoNCE takes from the tensors of each call: positives, ids, a bias, a guide."""

from fastsim.checks import check_bias_numbers, check_constant, check_range
from fastsim.pairs import Guide, as_bias, as_ids
from fastsim.records import replaced


def placeholders(guide, bias, options):
    """(guide, bias) of a `TileLoss`, with empty tensors in the places of those given, or Nones."""
    if guide is not None:
        relative = options["guide_strategy"] == "relative"
        empty = [side.new_empty(0) for side in guide]
        guide = Guide(*empty, None, float(options["guide_margin"]), relative)
    return guide, None if bias is None else bias.new_empty(0)


def with_tensors(tile, anchors, candidates, backend, given):
    """The tile with what `given` holds in these places.

    given: by name; positives (N,), row_ids (N,), column_ids (M,), candidate_bias (M,), guide_rows
        (N, E) and guide_columns (M, E), those that are present.
    """
    pairs, fields = tile.pairs, {}
    if "positives" in given:
        check_range("positives", given["positives"], candidates.shape[0])
        fields["positives"] = as_ids(given["positives"])
        if pairs.row_groups is not None:  # with label smoothing
            fields["row_groups"] = fields["positives"]
    if "row_ids" in given:
        fields |= {name: as_ids(given[name]) for name in ("row_ids", "column_ids")}
    if pairs.column_bias is not None:
        bias = given["candidate_bias"]
        check_constant("candidate_bias", bias)
        bias = as_bias(bias, anchors)
        if not backend.checks_bias:
            check_bias_numbers("candidate_bias", bias)
        fields["column_bias"] = bias
    if pairs.guide is not None:
        rows, columns = given["guide_rows"].detach(), given["guide_columns"].detach()
        fields["guide"] = replaced(pairs.guide, rows=rows, columns=columns)
    return replaced(tile, pairs=replaced(pairs, **fields)) if fields else tile


def explain(tile):
    """Raises an error that names the number if a bias is why the backend refused the loss."""
    if tile.pairs.column_bias is not None:
        check_bias_numbers("candidate_bias", tile.pairs.column_bias)

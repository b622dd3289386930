"""A softmax over plain products of rows, which several packages' in-batch losses are."""

from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import DOT
from fastsim.checks import check_integers, check_range, check_reduction, check_sides
from fastsim.engine.autograd import tile_loss
from fastsim.losses import info_nce_from_scores
from fastsim.pairs import Pairs, as_ids
from fastsim.reduce import as_float, equal_row_weights, inverse
from fastsim.scores import compute_dtype
from fastsim.tile import Tile


@embeddings_in_autocast("rows", "columns")
def cross_entropy(
    rows,
    columns,
    positives,
    scale,
    *,
    symmetric=False,
    reduction="mean",
    weights=None,
    names=("rows", "columns", "positives"),
):
    """-log softmax_j(scale x_i . y_j) at j = positives[i]: rows (N, D), columns (M, D).

    scale: a positive number or 0-d tensor. symmetric: the mean of that and of the columns among the
    rows. reduction: "mean", "sum" or "none"; weights (N,), in its place: sum_i weights_i loss_i.
    names: what the caller calls the tensors. TypeError, ValueError where these do not fit.
    """
    of_rows, of_columns, of_positives = names
    check_sides(of_columns, columns, of_rows, rows)
    check_integers(of_positives, positives, rows.shape[0], rows.device)
    check_range(of_positives, positives, columns.shape[0])
    check_reduction(reduction)
    positives = as_ids(positives)
    backend = pick(None, rows, columns, scale, kind="softmax", extras=(DOT,))
    if backend.name == "eager":
        scores = as_float(rows) @ as_float(columns).T
        losses = info_nce_from_scores(
            scores,
            positives,
            temperature=inverse(scale, rows),
            symmetric=symmetric,
            reduction=reduction if weights is None else "none",
        )
        return losses if weights is None else (weights * losses).sum()
    tile = Tile("softmax", Pairs(positives), symmetric=symmetric, cosine=False)
    if weights is None:
        weights = equal_row_weights(reduction, rows.shape[0], compute_dtype(rows), rows.device)

    def formula(scores, scale, _):
        given = {"temperature": 1 / scale, "symmetric": symmetric, "reduction": "none"}
        return info_nce_from_scores(scores, positives, **given)

    given = {"weights": weights, "formula": formula, "backend": backend}
    return tile_loss(tile, rows, columns, scale=scale, **given)

"""Cross entropy over dot products of rows: the in-batch loss of several packages."""

from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import DOT
from fastsim.checks import check_integers, check_range, check_reduction, check_sides
from fastsim.engine.autograd import tile_loss
from fastsim.losses import info_nce_from_scores
from fastsim.pairs import Pairs, as_ids
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float, equal_row_weights, inverse
from fastsim.tile_loss import TileLoss


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

    scale: a positive number or 0-d tensor. symmetric: the mean of this and of the same with rows
    and columns exchanged. reduction: "mean", "sum" or "none". weights (N,) replace the reduction:
    sum_i weights_i loss_i. names: the caller's names of the tensors, for messages. TypeError,
    ValueError for arguments that do not fit.
    """
    rows_name, columns_name, positives_name = names
    check_sides(columns_name, columns, rows_name, rows)
    check_integers(positives_name, positives, rows.shape[0], rows.device)
    check_range(positives_name, positives, columns.shape[0])
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
    tile = TileLoss("softmax", Pairs(positives), symmetric=symmetric, cosine=False)
    if weights is None:
        weights = equal_row_weights(reduction, rows.shape[0], compute_dtype(rows), rows.device)

    def formula(scores, scale, _):
        options = {"temperature": 1 / scale, "symmetric": symmetric, "reduction": "none"}
        return info_nce_from_scores(scores, positives, **options)

    options = {"weights": weights, "formula": formula, "backend": backend}
    return tile_loss(tile, rows, columns, scale=scale, **options)

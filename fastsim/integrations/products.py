"""A softmax over plain products of rows, which several packages' in-batch losses are."""

from fastsim.backends import pick
from fastsim.backends.extras import DOT
from fastsim.engine.autograd import tile_loss
from fastsim.losses import info_nce_from_scores
from fastsim.pairs import Pairs
from fastsim.reduce import as_float, inverse, row_weights
from fastsim.scores import compute_dtype
from fastsim.tile import Tile


def cross_entropy(rows, columns, positives, scale, *, symmetric=False, reduction="mean"):
    """-log softmax_j(scale x_i . y_j) at j = positives[i]: rows (N, D), columns (M, D).

    scale: a positive number or 0-d tensor. symmetric: the mean of that and of the columns among the
    rows. reduction: "mean", "sum" or "none".
    """
    backend = pick(None, rows, columns, scale, kind="softmax", extras=(DOT,))
    if backend.name == "eager":
        options = {"symmetric": symmetric, "reduction": reduction}
        scores = as_float(rows) @ as_float(columns).T
        return info_nce_from_scores(scores, positives, temperature=inverse(scale, rows), **options)
    tile = Tile("softmax", Pairs(positives), symmetric=symmetric, cosine=False)
    weights = row_weights(reduction, rows.shape[0], compute_dtype(rows), rows.device)

    def formula(scores, scale, _):
        given = {"temperature": 1 / scale, "symmetric": symmetric, "reduction": "none"}
        return info_nce_from_scores(scores, positives, **given)

    given = {"weights": weights, "formula": formula, "backend": backend}
    return tile_loss(tile, rows, columns, scale=scale, **given)

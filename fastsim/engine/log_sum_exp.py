"""Log-sum-exps over all scores of x and y, from which softmaxes over several matrices are made.

    rows_i = log sum_j exp(scale s_ij),   columns_j = log sum_i exp(scale s_ij)

s_ij is the cosine or the dot product of x_i and y_j.

The denominator of a softmax over several score matrices side by side is the log-sum-exp of their
log-sum-exps. So the rest of such a loss is plain torch on vectors (N,), and no N x M tensor exists.
"""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends import get, pick
from fastsim.backends.extras import DOT, GUIDE, UNTARGETED
from fastsim.checks import (
    SIMILARITIES,
    check_alike,
    check_choice,
    check_embeddings,
    check_number,
)
from fastsim.distributed import learnt_number
from fastsim.engine.autograd import tile_loss
from fastsim.operators import define
from fastsim.pairs import Guide, Pairs, pair_mask, parse_exclude
from fastsim.precision import compute_dtype, widened
from fastsim.reduce import as_float
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss


def log_sum_exp(
    x, y=None, *, scale, exclude=None, guide=None, columns=False, similarity="cosine", backend=None
):
    """Log-sum-exp of the scaled scores of each row: x (N, D), y (M, D) -> (N,).

    y: None compares x with itself.
    scale: a positive number or 0-d tensor, which may require a gradient.
    exclude: (row_ids (N,), column_ids (M,)) integers; pairs with equal ids are left out.
    guide: (rows (N, E), columns (M, E), thresholds (N,)); pair (i, j) is left out if the cosine of
        its guide embeddings is above thresholds[i] (see `guide_cosines`).
    columns: whether to also return those of the columns (M,), from the same pass.
    similarity: "cosine" or "dot".

    The results are float64, as they will be merged with others, and -inf if every pair is left out.
    ValueError or TypeError for arguments that do not fit, RuntimeError for a backend that cannot
    serve them.
    """
    check_embeddings("x", x)
    if y is not None:
        check_embeddings("y", y)
        check_alike("y", y, "x", x)
    scale = learnt_number(scale)
    check_number("scale", scale, positive=True)
    check_choice("similarity", similarity, SIMILARITIES)
    rows, count = x.shape[0], x.shape[0] if y is None else y.shape[0]
    row_ids, column_ids = parse_exclude(exclude, rows, count, x.device)
    guide = None if guide is None else as_guide(guide, rows, count, x)
    pairs = Pairs(row_ids=row_ids, column_ids=column_ids, guide=guide)
    needed = {UNTARGETED: True, GUIDE: guide is not None, DOT: similarity == "dot"}
    extras = tuple(extra for extra, wanted in needed.items() if wanted)
    chosen = pick(backend, x, y, scale, exclude, guide, kind="softmax", extras=extras)
    if chosen.name == "eager":
        scores = dense_scores(x, y, chosen, similarity)
        return _from_scores(scores, pairs, scale, columns)
    tile = TileLoss("softmax", pairs, symmetric=columns, cosine=similarity == "cosine")

    def formula(scores, scale, _):
        found = _from_scores(scores, pairs, scale, columns)
        return torch.cat(found) if columns else found

    both = tile_loss(tile, x, y, scale=scale, formula=formula, backend=chosen)
    return both.split([rows, count]) if columns else both


def guide_cosines(rows, columns, *, backend=None):
    """Cosines (N,) of paired guide embeddings (N, E), from which thresholds are made.

    They come from the same products as the guide's scores of all pairs, so that a copy of a pair
    ties with it instead of being left out by a rounding error.
    """
    check_embeddings("rows", rows)
    check_embeddings("columns", columns)
    check_alike("columns", columns, "rows", rows, rows=True)
    chosen = pick(backend, rows, columns, kind="softmax")
    with torch.no_grad():
        if chosen.name == "eager":
            sides = (torch.nn.functional.normalize(widened(s), dim=1) for s in (rows, columns))
            return torch.linalg.vecdot(*sides).to(compute_dtype(rows))
        return _guide_cosines(rows.detach(), columns.detach(), chosen.name)


def _paired(rows, columns, backend):
    chosen = get(backend)
    with without_autocast(rows.device.type):
        return chosen.paired_scores(chosen.scored_rows(rows), chosen.scored_rows(columns))


def _paired_fake(rows, columns, backend):
    return rows.new_empty(rows.shape[0], dtype=compute_dtype(rows))


_guide_cosines = define(
    "guide_cosines", "(Tensor rows, Tensor columns, str backend) -> Tensor", _paired, _paired_fake
)


def _from_scores(scores, pairs, scale, columns):
    logits = as_float(scores) * scale
    part = pair_mask(pairs, *scores.shape, scores.device)
    logits = logits.masked_fill(~part, -torch.inf)
    sums = tuple(safe_log_sum_exp(logits, part, dim) for dim in ((1, 0) if columns else (1,)))
    return sums if columns else sums[0]


def safe_log_sum_exp(logits, part, dim):
    """Log-sum-exp in float64; if all is left out -inf, with gradient 0 instead of NaN."""
    some = part.any(dim)
    held = logits.masked_fill(~some.unsqueeze(dim), 0.0)
    return widened(torch.logsumexp(held, dim)).masked_fill(~some, -torch.inf)


def as_guide(guide, rows, columns, x):
    """Checks (rows (N, E), columns (M, E), thresholds (N,)) and returns a `Guide` for x (N, D)."""
    guide_rows, guide_columns, thresholds = guide
    for name, value, count in (("rows", guide_rows, rows), ("columns", guide_columns, columns)):
        check_embeddings(f"guide {name}", value, empty=count == 0)
        if value.shape[0] != count:
            raise ValueError(f"guide {name}: wanted {count} rows, got {value.shape[0]}")
    check_alike("guide columns", guide_columns, "guide rows", guide_rows)
    if thresholds.shape != (rows,):
        raise ValueError(f"guide thresholds: wanted shape ({rows},), got {tuple(thresholds.shape)}")
    guide_rows, guide_columns = guide_beside(x, guide_rows, guide_columns)
    thresholds = thresholds.detach().to(compute_dtype(x))
    return Guide(guide_rows.detach(), guide_columns.detach(), thresholds)


def guide_beside(x, *guides):
    """The guide's embeddings, converted so that they are float64 if and only if x is.

    Thresholds and cosines then come from the same numbers. Otherwise rounding would decide whether
    a copy of the positive is left out.
    """
    dtype = compute_dtype(x)
    if guides[0].dtype == dtype or torch.float64 not in (guides[0].dtype, dtype):
        return guides
    first = guides[0].to(dtype)
    return first, *(first if guide is guides[0] else guide.to(dtype) for guide in guides[1:])

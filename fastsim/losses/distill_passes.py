"""What `distill` computes: of a small batch in one call, else in passes.

With d_ij = s_ij - (temperature / teacher_temperature) t_ij and m_i their mean over the columns, a
row of margin_mse is, up to a factor,

    sum_j (d_ij - d_{i, pos_i})^2 = sum_j (d_ij - m_i)^2 + M (d_{i, pos_i} - m_i)^2

The first term is a squared error of scores minus one number per row, the second a product of two
embeddings (`_of_rows`). For 16-bit embeddings the gradient of each term is rounded to 16 bits. What
all columns have in common is in neither term, so nothing large cancels where the two are added.
"""

from dataclasses import replace

import torch

from fastsim.backends import get
from fastsim.engine.autograd import tile_loss
from fastsim.engine.bands import by_bands
from fastsim.engine.whole_loss import WholeLoss
from fastsim.losses.further_candidates import above_mean, positive_logits
from fastsim.pairs import Factors, Pairs
from fastsim.precision import wide_dtype
from fastsim.reduce import inverse
from fastsim.scores import compute_dtype, dense_scores, unit_rows
from fastsim.tile import Tile


def small_loss(
    teacher_x, teacher_y, x, y, within, temperature, teacher_temperature, weights, backend
):
    """The `WholeLoss` of one process, the teacher's embeddings as they are."""
    if teacher_y is None:
        pairs = Pairs(within, dense=teacher_x.detach())
    else:
        pairs = Pairs(within, factors=Factors(teacher_x.detach(), teacher_y.detach(), cosine=True))
    scale, ratio = inverse(temperature, x), temperature / teacher_temperature
    if within is None:
        tile = Tile("distillation", pairs, positive_scale=1 / teacher_temperature)
        weights = weights * temperature**2
    else:
        tile = Tile("margins", pairs, positive_scale=ratio)
        weights = weights * scale**2 / max(y.shape[0] - 1, 1)

    def formula(scores, scale, _):
        taught = teacher_matrix(pairs, x)
        if within is None:
            return divergence(scores * scale, taught / teacher_temperature)
        gaps = scores - ratio * taught
        return (gaps.gather(1, within[:, None]) - gaps).square().sum(1)

    return WholeLoss(tile, scale, 0.0, weights, formula, backend, measured=False)


def divergences(x, y, pairs, batch, backend, temperature, teacher_temperature, weights):
    def formula(scores, scale, _):
        return divergence(scores * scale, teacher_matrix(pairs, x) / teacher_temperature)

    factor = temperature**2
    losses = tile_loss(
        Tile("distillation", pairs, positive_scale=1 / teacher_temperature),
        x,
        y,
        scale=inverse(temperature, x),
        weights=None if weights is None else factor * weights,
        batch=batch,
        formula=formula,
        backend=backend,
        measured=False,
    )
    return factor * losses if weights is None else losses


def margins_by_pass(
    x, y, pairs, batch, backend, temperature, teacher_temperature, weights, within, positives
):
    others = batch.columns - 1
    pairs = _times(pairs, temperature / teacher_temperature, x, backend)
    mean, above = _of_rows(x, y, pairs, batch, backend, within, positives)
    pairs = replace(pairs, row_shift=mean.detach())

    def formula(scores, *_):
        taught = teacher_matrix(pairs, x)
        return (scores - taught - pairs.row_shift[:, None]).square().sum(1)

    # 1 / others, and 0 where there are none, without asking which: the number may be a symbol.
    factor = others / (temperature * max(others, 1)) ** 2
    losses = tile_loss(
        Tile("squared_error", pairs),
        x,
        y,
        scale=1.0,
        weights=None if weights is None else factor * weights,
        batch=batch,
        formula=formula,
        backend=backend,
        measured=False,
    )
    # The tile takes a number m0 for the mean m: sum_j (d_ij - m)^2 = sum_j (d_ij - m0)^2 - M b^2,
    # b = m - m0. It is 0, and so is its share of the gradient, but not of derivatives of that.
    beyond = mean - mean.detach()
    more = factor * batch.columns * (above.square() - beyond.square())
    if weights is None:
        return factor * losses + more
    return losses + (weights * more).sum().to(losses.dtype)


def _of_rows(x, y, pairs, batch, backend, within, positives):
    """(N,) the mean of d over the columns, and by how much d at the positives is above it."""
    own = positive_logits(x, y, within, 1.0, "cosine", backend).to(compute_dtype(x))
    above = above_mean(x, y, within, "cosine", batch, backend)
    mean = own - above
    if pairs.factors is not None:
        taught, taught_above = _of_factors(pairs.factors, positives, backend).T
        return mean - (taught - taught_above), above - taught_above
    taught = pairs.dense.gather(1, positives[:, None])[:, 0].to(own.dtype)
    taught_mean = pairs.dense.mean(1, dtype=wide_dtype(x.device)).to(own.dtype)
    return mean - taught_mean, above - (taught - taught_mean)


def _of_factors(factors, positives, backend):
    """(N, 2) a teacher's scores of the positives, and by how much they are above their mean."""
    rows, columns, cosine = factors

    def scored(rows):
        return unit_rows(rows, backend) if cosine else rows

    def total_of(columns, *_):
        return scored(columns).sum(0, dtype=wide_dtype(columns.device))

    def of(rows, columns, mean):
        rows, columns = scored(rows), scored(columns)
        return torch.stack([(rows * columns).sum(1), (rows * (columns - mean)).sum(1)], 1)

    mean = (by_bands(total_of, columns, summed=True) / len(columns)).to(columns.dtype)
    return by_bands(of, rows, columns, mean, index=positives)


def taught_pairs(teacher_x, teacher_y, x, batch):
    """The teacher's scores as the targets of the rank's rows and the columns of all ranks."""
    if teacher_y is None:
        return Pairs(dense=teacher_x.detach())
    rows = teacher_x.detach().to(compute_dtype(x))
    if teacher_y is teacher_x and batch.group is None:
        return Pairs(factors=Factors(rows, rows, cosine=True))
    columns = batch.gather_columns(teacher_y.detach().to(compute_dtype(x)))
    return Pairs(factors=Factors(rows, columns, cosine=True))


def _times(pairs, ratio, x, backend):
    """The pairs with targets that many times as large."""
    if ratio == 1:
        return pairs
    if pairs.factors is None:
        return Pairs(dense=ratio * pairs.dense.to(compute_dtype(x)))
    rows, columns = (unit_rows(side, backend) for side in pairs.factors[:2])
    return Pairs(factors=Factors(ratio * rows, columns))


def teacher_matrix(pairs, x):
    """The teacher's scores (N, M) of this rank's rows."""
    if pairs.factors is None:
        return pairs.dense.to(compute_dtype(x))
    rows, columns, cosine = pairs.factors
    return dense_scores(rows, columns, get("eager"), "cosine" if cosine else "dot")


def divergence(logits, teacher_logits):
    """KL(p || q) (N,): p the softmax of teacher_logits, q that of logits."""
    own, taught = (torch.log_softmax(side, 1) for side in (logits, teacher_logits))
    return (taught.exp() * (taught - own)).sum(1)

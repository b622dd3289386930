"""The computation of `distill`: in one call for a small batch, otherwise in passes.

Let d_ij = s_ij - (temperature / teacher_temperature) t_ij, and m_i its mean over the columns. Up to
a factor, a row of margin_mse is

    sum_j (d_ij - d_{i, pos_i})^2 = sum_j (d_ij - m_i)^2 + M (d_{i, pos_i} - m_i)^2

The first term is a squared error of scores minus one number per row. The second term comes from a
product of two embeddings (`_mean_and_above`). For 16-bit embeddings the gradient of each term is
rounded to 16 bits. Neither term contains the part that all columns share, so the sum of the two
gradients does not cancel large numbers.
"""

from dataclasses import replace

import torch

from fastsim.backends import get
from fastsim.engine.autograd import tile_loss
from fastsim.engine.bands import by_bands
from fastsim.engine.one_call_loss import OneCallLoss
from fastsim.losses.further_candidates import above_mean, positive_logits
from fastsim.pairs import Factors, Pairs
from fastsim.precision import compute_dtype, wide_dtype
from fastsim.reduce import inverse
from fastsim.scores import dense_scores, unit_rows
from fastsim.tile_loss import TileLoss


def small_loss(
    teacher_x, teacher_y, x, y, within, temperature, teacher_temperature, weights, backend
):
    """The `OneCallLoss` for one process; the teacher's embeddings are used unchanged."""
    if teacher_y is None:
        pairs = Pairs(within, dense=teacher_x.detach())
    else:
        pairs = Pairs(within, factors=Factors(teacher_x.detach(), teacher_y.detach(), cosine=True))
    scale, ratio = inverse(temperature, x), temperature / teacher_temperature
    if within is None:
        tile = TileLoss("distillation", pairs, positive_scale=1 / teacher_temperature)
        weights = weights * temperature**2
    else:
        tile = TileLoss("margins", pairs, positive_scale=ratio)
        weights = weights * scale**2 / max(y.shape[0] - 1, 1)

    def formula(scores, scale, _):
        taught = teacher_matrix(pairs, x)
        if within is None:
            return divergence(scores * scale, taught / teacher_temperature)
        gaps = scores - ratio * taught
        return (gaps.gather(1, within[:, None]) - gaps).square().sum(1)

    return OneCallLoss(tile, scale, 0.0, weights, formula, backend, for_metrics=False)


def divergences(x, y, pairs, batch, backend, temperature, teacher_temperature, weights):
    """The loss of kind "kl": losses (N,), or with weights their weighted sum."""

    def formula(scores, scale, _):
        return divergence(scores * scale, teacher_matrix(pairs, x) / teacher_temperature)

    factor = temperature**2
    losses = tile_loss(
        TileLoss("distillation", pairs, positive_scale=1 / teacher_temperature),
        x,
        y,
        scale=inverse(temperature, x),
        weights=None if weights is None else factor * weights,
        batch=batch,
        formula=formula,
        backend=backend,
        for_metrics=False,
    )
    return factor * losses if weights is None else losses


def margins_by_pass(
    x, y, pairs, batch, backend, temperature, teacher_temperature, weights, within, positives
):
    """The loss of kind "margin_mse": losses (N,), or with weights their weighted sum.

    within, positives: (N,) the positives' columns among those of this rank, and of all ranks.
    """
    others = batch.columns - 1
    pairs = _times(pairs, temperature / teacher_temperature, x, backend)
    mean, above = _mean_and_above(x, y, pairs, batch, backend, within, positives)
    pairs = replace(pairs, row_shift=mean.detach())

    def formula(scores, *_):
        taught = teacher_matrix(pairs, x)
        return (scores - taught - pairs.row_shift[:, None]).square().sum(1)

    # 1 / others, or 0 if others = 0, without a branch: torch.compile may hold it as a symbol.
    factor = others / (temperature * max(others, 1)) ** 2
    losses = tile_loss(
        TileLoss("squared_error", pairs),
        x,
        y,
        scale=1.0,
        weights=None if weights is None else factor * weights,
        batch=batch,
        formula=formula,
        backend=backend,
        for_metrics=False,
    )
    # The tile loss uses a constant m0 for the mean m: sum_j (d_ij - m)^2 is
    # sum_j (d_ij - m0)^2 - M b^2 with b = m - m0. b^2 and its gradient are 0, but its second
    # derivative is not.
    beyond = mean - mean.detach()
    more = factor * batch.columns * (above.square() - beyond.square())
    if weights is None:
        return factor * losses + more
    return losses + (weights * more).sum().to(losses.dtype)


def _mean_and_above(x, y, pairs, batch, backend, within, positives):
    """m_i and d_{i, pos_i} - m_i, (N,) each; see the head of the file."""
    student = positive_logits(x, y, within, 1.0, "cosine", backend).to(compute_dtype(x))
    above = above_mean(x, y, within, "cosine", batch, backend)
    mean = student - above
    if pairs.factors is not None:
        teacher, teacher_above = _teacher_positives(pairs.factors, positives, backend).T
        return mean - (teacher - teacher_above), above - teacher_above
    teacher = pairs.dense.gather(1, positives[:, None])[:, 0].to(student.dtype)
    teacher_mean = pairs.dense.mean(1, dtype=wide_dtype(x.device)).to(student.dtype)
    return mean - teacher_mean, above - (teacher - teacher_mean)


def _teacher_positives(factors, positives, backend):
    """(N, 2) the teacher's score of each positive, and that score minus the mean of the row."""
    rows, columns, cosine = factors

    def scored(rows):
        return unit_rows(rows, backend) if cosine else rows

    def column_sum(columns, *_):
        return scored(columns).sum(0, dtype=wide_dtype(columns.device))

    def positive_and_above(rows, columns, mean):
        rows, columns = scored(rows), scored(columns)
        return torch.stack([(rows * columns).sum(1), (rows * (columns - mean)).sum(1)], 1)

    mean = (by_bands(column_sum, columns, summed=True) / len(columns)).to(columns.dtype)
    return by_bands(positive_and_above, rows, columns, mean, index=positives)


def taught_pairs(teacher_x, teacher_y, x, batch):
    """`Pairs` with the teacher's scores as targets: rows of this rank, columns of all ranks."""
    if teacher_y is None:
        return Pairs(dense=teacher_x.detach())
    rows = teacher_x.detach().to(compute_dtype(x))
    if teacher_y is teacher_x and batch.group is None:
        return Pairs(factors=Factors(rows, rows, cosine=True))
    columns = batch.gather_columns(teacher_y.detach().to(compute_dtype(x)))
    return Pairs(factors=Factors(rows, columns, cosine=True))


def _times(pairs, ratio, x, backend):
    """The pairs with their targets multiplied by `ratio`."""
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
    """KL(p || q) (N,), with p the softmax of teacher_logits and q the softmax of logits."""
    student, teacher = (torch.log_softmax(side, 1) for side in (logits, teacher_logits))
    return (teacher.exp() * (teacher - student)).sum(1)

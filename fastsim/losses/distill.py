"""Distillation over the batch: every pair's score is to follow a teacher's.

    kl           L_i = temperature^2 sum_j p_ij (log p_ij - log q_ij)
                 q_i = softmax_j(s_ij / temperature),  p_i = softmax_j(t_ij / teacher_temperature)
    margin_mse   L_i = 1 / (M - 1) sum_{j != pos_i} (m_ij - n_ij)^2
                 m_ij = (s_{i, pos_i} - s_ij) / temperature
                 n_ij = (t_{i, pos_i} - t_ij) / teacher_temperature

s_ij is the cosine of x_i and y_j, t_ij that of the teacher's embeddings of the pair. Its matrix is
never made: a panel of it stands beside the panel of the scores. Or it is given, as a cross-encoder
gives it.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2, whose factor
temperature^2 keeps the size of the gradient; over the candidates of a batch: Lin et al. 2020,
"Distilling Dense Representations for Ranking using Tightly-Coupled Teachers"; Margin-MSE:
Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
Distillation".

With d_ij = s_ij - (temperature / teacher_temperature) t_ij a row of margin_mse is, but for its
factor, sum_j (d_ij - c)^2 at c = d_{i, pos_i}: a squared error of scores less a number of their
row. What c adds to the gradient is a sum over columns, so one of embeddings (`_of_positives`).
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction
from fastsim.backends import get, pick
from fastsim.backends.extras import TEACHER
from fastsim.checks import (
    FLOATING,
    INTEGRAL,
    check_alike,
    check_choice,
    check_columns,
    check_device,
    check_embeddings,
    check_enough,
    check_number,
    check_reduction,
    check_scores,
    check_sides,
    check_tensor,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import SmallLoss, tile_loss
from fastsim.engine.prepared import Prepared, note, once_per_signature
from fastsim.losses.further_candidates import above_mean, positive_logits
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Factors,
    Pairs,
    global_positives,
    parse_positives,
)
from fastsim.precision import wide_dtype
from fastsim.reduce import as_float, inverse, reduce
from fastsim.scores import compute_dtype, dense_cosines, dense_scores, unit_rows
from fastsim.tile import Tile

TEMPERATURES = {"kl": 0.05, "margin_mse": 1.0}  # by default


@once_per_signature
@batchwise
def distill(
    x: Tensor,
    y: Tensor,
    teacher_x: Tensor,
    teacher_y: Tensor | None = None,
    positives: Tensor | None = None,
    *,
    kind: Literal["kl", "margin_mse"] = "kl",
    temperature: float | None = None,
    teacher_temperature: float | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Distillation of a teacher's scores of every pair of the batch.

    To train a small encoder on what a large one, or a cross-encoder, thinks of all pairs. Take "kl"
    first; "margin_mse" where differences of scores are to be met, as for an index of two models.
    Where a teacher has scored tokens' documents, take `late_interaction_distillation`; for the
    values of scores themselves `matrix_mse`.

    Args:
        x: (N, D).
        y: (M, D), the candidates of every row.
        teacher_x: (N, E), the teacher's embeddings of the same rows; or, without `teacher_y`, its
            scores (N, M), any real numbers. No gradient reaches the teacher.
        teacher_y: (M, E), the teacher's embeddings of the candidates.
        positives: (N,) integers, for "margin_mse" alone: the column whose score the others of a row
            are compared with; `arange(N)` by default.
        kind: "kl", the divergence of a row's softmax from the teacher's; or "margin_mse", the
            squared error of a row's margins, the score of the positive less that of another.
        temperature: what the scores are divided by, a positive number; None: 0.05 for "kl", 1 for
            "margin_mse".
        teacher_temperature: what the teacher's scores are divided by, a positive number; None:
            `temperature`. Logits of a cross-encoder from -10 to 10 meet cosines with 10 times
            `temperature`. Of a given matrix "margin_mse" then holds one more.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`. Scores of a teacher hold the rank's own rows against the
            candidates of all ranks.
        backend: its name; None chooses.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> student, teacher = torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> fastsim.distill(student, student, teacher, teacher, kind="margin_mse")  # (1 - 0.4)^2
        tensor(0.3600)
    """
    check_sides("y", y, "x", x, empty=group is not None)
    check_reduction(reduction)
    temperature, teacher_temperature = _temperatures(kind, temperature, teacher_temperature)
    _check_teacher(teacher_x, teacher_y, x, y, group)
    margins = kind == "margin_mse"
    if positives is None and margins:
        check_enough("y", y, "x", x)
    within = _positives(positives, kind, x.shape[0], y.shape[0], x.device)
    engine_kind = "squared_error" if margins else "distillation"
    chosen = pick(backend, x, y, kind=engine_kind, group=group, extras=(TEACHER,))
    batch = join(
        group,
        "distill",
        x,
        y,
        kind=kind,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        targets=teacher_x if teacher_y is None else None,
        reduction=reduction,
        backend=chosen.name,
    )
    made = partial(
        _loss,
        within=within,
        kind=kind,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        reduction=reduction,
        batch=batch,
        backend=chosen,
    )
    teacher = (teacher_x,) if teacher_y is None else (teacher_x, teacher_y)
    loss = made(x, y, *teacher)
    if group is None and positives is None:
        note((x, y, *teacher), Prepared(made), loss)
    return loss


def _loss(
    x,
    y,
    teacher_x,
    teacher_y=None,
    *,
    within,
    kind,
    temperature,
    teacher_temperature,
    reduction,
    batch,
    backend,
):
    """within: (N,) the columns of the positives among this rank's, of "margin_mse"."""
    margins = kind == "margin_mse"
    weights = batch.row_weights(reduction, x)
    if batch.group is None and weights is not None:
        given = within, temperature, teacher_temperature, weights, backend
        small = _small(teacher_x, teacher_y, x, y, *given)
        if small.serves(x, y):
            return small(x, y)
    pairs = _taught(teacher_x, teacher_y, x, batch, backend)
    positives = global_positives(within, batch) if margins else None
    if backend.name == "eager":
        scores = dense_cosines(*batch.gather_both(x, y), backend)
        taught = batch.gather_rows(_matrix(pairs, x))
        options = {"temperature": temperature, "teacher_temperature": teacher_temperature}
        positives = batch.gather_rows(positives)
        losses = distill_from_scores(
            scores, taught, positives, kind=kind, **options, reduction="none"
        )
        return batch.reduce(losses, reduction)
    given = x, y, pairs, batch, backend, temperature, teacher_temperature, weights
    return _margins(*given, within, positives) if margins else _divergences(*given)


class Distill(LossModule):
    """The module of `distill`."""

    function = staticmethod(distill)

    def __init__(
        self,
        *,
        kind: Literal["kl", "margin_mse"] = "kl",
        temperature: float | None = None,
        teacher_temperature: float | None = None,
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def distill_from_scores(
    scores: Tensor,
    teacher_scores: Tensor,
    positives: Tensor | None = None,
    *,
    kind: Literal["kl", "margin_mse"] = "kl",
    temperature: float | None = None,
    teacher_temperature: float | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `distill`: scores and teacher_scores (N, M), the rest as there."""
    check_scores("scores", scores)
    check_reduction(reduction)
    temperature, teacher_temperature = _temperatures(kind, temperature, teacher_temperature)
    rows, columns = scores.shape
    if positives is None and kind == "margin_mse":
        check_columns(scores)
    place = _positives(positives, kind, rows, columns, scores.device)
    _check_matrix("teacher_scores", teacher_scores, rows, columns, scores.device)
    own = as_float(scores) / temperature
    taught = teacher_scores.detach().to(own.dtype) / teacher_temperature
    if kind == "kl":
        return reduce(temperature**2 * _divergence(own, taught), reduction)
    own, taught = (side.gather(1, place[:, None]) - side for side in (own, taught))
    return reduce((own - taught).square().sum(1) / max(columns - 1, 1), reduction)


def _small(teacher_x, teacher_y, x, y, within, temperature, teacher_temperature, weights, backend):
    """The `SmallLoss` of one process, the teacher's embeddings as they are."""
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
        taught = _matrix(pairs, x)
        if within is None:
            return _divergence(scores * scale, taught / teacher_temperature)
        gaps = scores - ratio * taught
        return (gaps.gather(1, within[:, None]) - gaps).square().sum(1)

    return SmallLoss(tile, scale, 0.0, weights, formula, backend)


def _divergences(x, y, pairs, batch, backend, temperature, teacher_temperature, weights):
    def formula(scores, scale, _):
        return _divergence(scores * scale, _matrix(pairs, x) / teacher_temperature)

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


def _margins(
    x, y, pairs, batch, backend, temperature, teacher_temperature, weights, within, positives
):
    others = batch.columns - 1
    pairs = _times(pairs, temperature / teacher_temperature, x)
    gap, above = _of_positives(x, y, pairs, batch, backend, within, positives)
    pairs = replace(pairs, row_shift=gap.detach())

    def formula(scores, *_):
        taught = _matrix(pairs, x)
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
    # With b = c - c0 beyond the number c0 that was taken from the scores, and a = c - mean_j d_ij:
    # sum_j (d_ij - c)^2 = sum_j (d_ij - c0)^2 + M (2 b a - b^2). b is 0, but not its gradient.
    beyond = gap - gap.detach()
    more = factor * batch.columns * (2 * beyond * above - beyond.square())
    if weights is None:
        return factor * losses + more
    return losses + (weights * more).sum().to(losses.dtype)


def _of_positives(x, y, pairs, batch, backend, within, positives):
    """(N,) d at the positives, and by how much it is above its mean over the columns."""
    own = positive_logits(x, y, within, 1.0, "cosine", backend).to(compute_dtype(x))
    above = above_mean(x, y, within, "cosine", batch, backend)
    if pairs.factors is not None:
        rows, columns, _ = pairs.factors
        mean = columns.mean(0, dtype=wide_dtype(columns.device)).to(columns.dtype)
        of_positives = columns[positives]
        taught = (rows * of_positives).sum(1)
        return own - taught, above - (rows * (of_positives - mean)).sum(1)
    taught = pairs.dense.gather(1, positives[:, None])[:, 0].to(own.dtype)
    mean = pairs.dense.mean(1, dtype=wide_dtype(x.device)).to(own.dtype)
    return own - taught, above - (taught - mean)


def _taught(teacher_x, teacher_y, x, batch, backend):
    """The teacher's scores as the targets of the rank's rows and the columns of all ranks."""
    if teacher_y is None:
        return Pairs(dense=teacher_x.detach())
    with torch.no_grad():
        rows = unit_rows(teacher_x.detach().to(compute_dtype(x)), backend)
        if teacher_y is teacher_x and batch.group is None:
            return Pairs(factors=Factors(rows, rows))
        columns = unit_rows(teacher_y.detach().to(compute_dtype(x)), backend)
        return Pairs(factors=Factors(rows, batch.gather_columns(columns)))


def _times(pairs, ratio, x):
    """The pairs with targets that many times as large."""
    if ratio == 1:
        return pairs
    if pairs.factors is None:
        return Pairs(dense=ratio * pairs.dense.to(compute_dtype(x)))
    return Pairs(factors=Factors(ratio * pairs.factors.rows, pairs.factors.columns))


def _matrix(pairs, x):
    """The teacher's scores (N, M) of this rank's rows."""
    if pairs.factors is None:
        return pairs.dense.to(compute_dtype(x))
    rows, columns, cosine = pairs.factors
    return dense_scores(rows, columns, get("eager"), "cosine" if cosine else "dot")


def _divergence(logits, teacher_logits):
    """(N,) of the softmax of the first from that of the second."""
    own, taught = (torch.log_softmax(side, 1) for side in (logits, teacher_logits))
    return (taught.exp() * (taught - own)).sum(1)


def _positives(positives, kind, rows, columns, device):
    if kind == "margin_mse":
        return parse_positives(positives, rows, columns, device)
    if positives is not None:
        raise ValueError("positives: wanted with kind 'margin_mse' alone, got them with 'kl'")
    return None


def _temperatures(kind, temperature, teacher_temperature):
    """Both as numbers, by default as the kind has them."""
    check_choice("kind", kind, tuple(TEMPERATURES))
    temperature = TEMPERATURES[kind] if temperature is None else temperature
    check_number("temperature", temperature, positive=True, tensor=False)
    if teacher_temperature is None:
        return temperature, temperature
    check_number("teacher_temperature", teacher_temperature, positive=True, tensor=False)
    return temperature, teacher_temperature


def _check_teacher(teacher_x, teacher_y, x, y, group):
    empty = group is not None
    if teacher_y is None:
        columns = None if empty else y.shape[0]  # the ranks have to meet first
        _check_matrix("teacher_x", teacher_x, x.shape[0], columns, x.device)
        return
    for name, teacher, student in (("teacher_x", teacher_x, x), ("teacher_y", teacher_y, y)):
        check_embeddings(name, teacher, empty=empty)
        if teacher.shape[0] != student.shape[0]:
            raise ValueError(
                f"{name}: wanted {student.shape[0]} rows, one of each row of the student, got"
                f" {teacher.shape[0]}"
            )
    check_device("teacher_x", teacher_x, "x", x)
    check_alike("teacher_y", teacher_y, "teacher_x", teacher_x)


def _check_matrix(name, matrix, rows, columns, device):
    """TypeError or ValueError for what is no matrix (rows, columns) of real numbers."""
    dtypes, what = (*FLOATING, *INTEGRAL), "a real or integer matrix"
    check_tensor(name, matrix, ndim=2, dtypes=dtypes, what=what, empty=rows == 0)
    wanted = rows, matrix.shape[1] if columns is None else columns
    if matrix.shape != wanted:
        raise ValueError(
            f"{name}: wanted scores of shape {wanted}, or embeddings with those of the candidates,"
            f" got shape {tuple(matrix.shape)}"
        )
    if matrix.device != device:
        raise ValueError(f"{name}: wanted device {device}, got {matrix.device}")

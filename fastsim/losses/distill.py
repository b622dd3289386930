"""Distillation over the batch: the score of every pair is trained to follow a teacher's score.

    kl           L_i = temperature^2 sum_j p_ij (log p_ij - log q_ij)
                 q_i = softmax_j(s_ij / temperature),  p_i = softmax_j(t_ij / teacher_temperature)
    margin_mse   L_i = 1 / (M - 1) sum_{j != pos_i} (m_ij - n_ij)^2
                 m_ij = (s_{i, pos_i} - s_ij) / temperature
                 n_ij = (t_{i, pos_i} - t_ij) / teacher_temperature

s_ij is the cosine of x_i and y_j. t_ij is the cosine of the teacher's embeddings of the same pair;
the whole matrix of t is never held, each panel is computed with the panel of s. Or the caller
passes the matrix of t, for example the scores of a cross-encoder.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", section 2; the factor
temperature^2 keeps the size of the gradient; over the candidates of a batch: Lin et al. 2020,
"Distilling Dense Representations for Ranking using Tightly-Coupled Teachers"; Margin-MSE:
Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
Distillation".
"""

from functools import partial
from typing import Literal

from torch import Tensor

from fastsim.annotations import Group, Reduction
from fastsim.autocast import embeddings_in_autocast, in_autocast
from fastsim.backends import pick
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
from fastsim.engine.prepared import note, once_per_signature
from fastsim.losses.distill_passes import (
    divergence,
    divergences,
    margins_by_pass,
    small_loss,
    taught_pairs,
    teacher_matrix,
)
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    global_positives,
    parse_positives,
)
from fastsim.reduce import as_float, reduce
from fastsim.scores import dense_cosines

TEMPERATURES = {"kl": 0.05, "margin_mse": 1.0}  # the defaults


@embeddings_in_autocast("x", "y")
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
    """Distillation of a teacher's scores of all pairs of the batch.

    Trains a small encoder on the scores of a larger encoder or a cross-encoder. Try "kl" first; use
    "margin_mse" if the differences between scores matter, for example if two models share an index.
    Use `late_interaction_distillation` for token embeddings, `matrix_mse` to train the values of
    the scores.

    Formula and source: fastsim/losses/distill.py.

    Args:
        x: (N, D).
        y: (M, D), the candidates of every row.
        teacher_x: (N, E), the teacher's embeddings of the same rows; or without `teacher_y` its
            scores (N, M), any real numbers. The teacher gets no gradient.
        teacher_y: (M, E), the teacher's embeddings of the candidates.
        positives: (N,) integers, only for "margin_mse": the column of each row's positive; None:
            `arange(N)`.
        kind: "kl", the divergence KL(p || q) of the student's softmax q from the teacher's p; or
            "margin_mse", the squared error of the margins. A margin is the score of the positive
            minus that of another candidate.
        temperature: a positive number that divides the scores; None: 0.05 for "kl", 1 for
            "margin_mse".
        teacher_temperature: a positive number that divides the teacher's scores; None:
            `temperature`. 10 times `temperature` brings logits of a cross-encoder from -10 to 10
            into the range of cosines. If it differs from `temperature` and teacher_x holds scores,
            "margin_mse" holds one more N x M matrix.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`. A matrix of teacher scores has the rows of this rank, and the
            candidates of all ranks as columns.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> student, teacher = torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> fastsim.distill(student, student, teacher, teacher, kind="margin_mse")  # (1 - 0.4)^2
        tensor(0.3600)
    """
    check_sides("y", y, "x", x, empty=group is not None)
    check_reduction(reduction)
    temperature, teacher_temperature = _temperatures(kind, temperature, teacher_temperature)
    _check_teacher(teacher_x, teacher_y, x, y, group)
    if teacher_y is not None:  # otherwise teacher_x holds scores
        teacher_x, teacher_y = in_autocast(teacher_x, teacher_y)
    margins = kind == "margin_mse"
    if positives is None and margins:
        check_enough("y", y, "x", x)
    within = _positives(positives, kind, x.shape[0], y.shape[0], x.device)
    engine_kind = "squared_error" if margins else "distillation"
    tensors = x, y, teacher_x, teacher_y, positives
    chosen = pick(backend, *tensors, kind=engine_kind, group=group, extras=(TEACHER,))
    batch = join(
        group,
        "distill",
        x,
        y,
        kind=kind,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        targets=teacher_x if teacher_y is None else None,
        teacher_y=None if teacher_y is None else teacher_y.shape[1],
        reduction=reduction,
        backend=chosen.name,
    )
    loss_of = partial(
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
    loss = loss_of(x, y, *teacher)
    if group is None and positives is None:
        note((x, y, *teacher), loss_of, loss)
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
    """within: (N,) the positives' columns among this rank's candidates, for "margin_mse"."""
    margins = kind == "margin_mse"
    weights = batch.row_weights(reduction, x)
    if batch.group is None and weights is not None:
        options = within, temperature, teacher_temperature, weights, backend
        small = small_loss(teacher_x, teacher_y, x, y, *options)
        if small.serves(x, y):
            return small(x, y)
    pairs = taught_pairs(teacher_x, teacher_y, x, batch)
    positives = global_positives(within, batch) if margins else None
    if backend.name == "eager":
        scores = dense_cosines(*batch.gather_both(x, y), backend)
        taught = batch.gather_rows(teacher_matrix(pairs, x))
        options = {"temperature": temperature, "teacher_temperature": teacher_temperature}
        positives = batch.gather_rows(positives)
        losses = distill_from_scores(
            scores, taught, positives, kind=kind, **options, reduction="none"
        )
        return batch.reduce(losses, reduction)
    arguments = x, y, pairs, batch, backend, temperature, teacher_temperature, weights
    return margins_by_pass(*arguments, within, positives) if margins else divergences(*arguments)


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
    """The specification of `distill` for scores and teacher_scores (N, M); the rest as there."""
    check_scores("scores", scores)
    check_reduction(reduction)
    temperature, teacher_temperature = _temperatures(kind, temperature, teacher_temperature)
    rows, columns = scores.shape
    if positives is None and kind == "margin_mse":
        check_columns(scores)
    place = _positives(positives, kind, rows, columns, scores.device)
    _check_matrix("teacher_scores", teacher_scores, rows, columns, scores.device)
    student = as_float(scores) / temperature
    teacher = teacher_scores.detach().to(student.dtype) / teacher_temperature
    if kind == "kl":
        return reduce(temperature**2 * divergence(student, teacher), reduction)
    student, teacher = (side.gather(1, place[:, None]) - side for side in (student, teacher))
    return reduce((student - teacher).square().sum(1) / max(columns - 1, 1), reduction)


def _positives(positives, kind, rows, columns, device):
    if kind == "margin_mse":
        return parse_positives(positives, rows, columns, device)
    if positives is not None:
        raise ValueError("positives: cannot be combined with kind 'kl'; only 'margin_mse' has them")
    return None


def _temperatures(kind, temperature, teacher_temperature):
    """(temperature, teacher_temperature) with the defaults filled in."""
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
        columns = None if empty else y.shape[0]  # with a group `join` checks them
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
    """Raises a TypeError or ValueError for anything but a real matrix (rows, columns)."""
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

"""Mean squared error of the score matrix against a target matrix.

    L_i = (1/M) sum_j (cos_ij - t_ij)^2;  the mean is torch.nn.MSELoss()(S, targets)

Source: torch.nn.MSELoss, applied to (S, targets).

The score gradient of a pair needs only its score and target, so one fused pass over the scores
gives loss and gradient. Targets of +-1 would drive every pair of different groups to cosine -1, so
use graded targets. `cosent_matrix` trains the order of the scores instead of their values.
"""

from functools import partial

from torch import Tensor

from fastsim.annotations import Group, Reduction, Targets
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.checks import check_reduction, check_scores, check_sides
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.later_calls import given_targets
from fastsim.engine.prepared import once_per_signature
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Pairs,
    check_own_targets,
    dense_targets,
    gather_targets,
    global_targets,
    known_targets,
    parse_targets,
)
from fastsim.records import replaced
from fastsim.reduce import as_float, reduce
from fastsim.scores import dense_cosines
from fastsim.tile_loss import TileLoss

_TILE = TileLoss("squared_error", Pairs())


@embeddings_in_autocast("x", "y")
@once_per_signature
@batchwise
def matrix_mse(
    x: Tensor,
    y: Tensor,
    targets: Targets,
    *,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Mean squared error of the cosines against a target matrix.

    For graded targets of every pair whose values matter. `cosent_matrix` trains only their order;
    `cosine_regression` is the same for a list of pairs.

    Formula and source: fastsim/losses/matrix_mse.py.

    Args:
        x: (N, D).
        y: (M, D).
        targets: (N, M) of any real or integer dtype, 1 for similar pairs, -1 for others, or soft
            values between; or (row_groups (N,), column_groups (M,)), integers, with target 1 for
            equal groups, otherwise -1; or None: 1 on the diagonal, otherwise -1.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or the row means (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> rows = torch.eye(2)
        >>> fastsim.matrix_mse(rows, rows, None)  # the two zeros should be -1
        tensor(0.5000)
    """
    check_sides("y", y, "x", x, empty=group is not None)
    check_reduction(reduction)
    chosen = pick(backend, x, y, targets, kind="squared_error", group=group)
    check_own_targets(targets, x, y, group)
    batch = join(
        group, "matrix_mse", x, y, targets=targets, reduction=reduction, backend=chosen.name
    )
    targets = global_targets(targets, batch, x.device)
    if chosen.name == "eager":
        scores = dense_cosines(*batch.gather_both(x, y), chosen)
        losses = matrix_mse_from_scores(scores, gather_targets(targets, batch), reduction="none")
        return batch.reduce(losses, reduction)
    columns, weights = batch.columns, batch.row_weights(reduction, x)
    losses = tile_loss(
        x=x,
        y=y,
        **_tile(x, targets, columns=columns),
        scale=1.0,
        given=given_targets(targets, partial(_tile, columns=columns, parse=known_targets)),
        weights=None if weights is None else weights / columns,
        batch=batch,
        backend=chosen,
        summed=weights is not None,
    )
    return losses / columns if weights is None else losses


def _tile(x, targets, *, columns, parse=parse_targets):
    """The `TileLoss` for these targets, and the formula of the sum over each row."""

    def formula(scores, *_):
        return columns * matrix_mse_from_scores(scores, targets, reduction="none")

    pairs = parse(targets, x.shape[0], columns, x.device)
    return {"tile": replaced(_TILE, pairs=pairs), "formula": formula}


class MatrixMSE(LossModule):
    """The module of `matrix_mse`."""

    function = staticmethod(matrix_mse)

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def matrix_mse_from_scores(
    scores: Tensor, targets: Targets, *, reduction: Reduction = "mean"
) -> Tensor:
    """The specification of `matrix_mse` for scores (N, M), with the same other parameters."""
    check_scores("scores", scores)
    check_reduction(reduction)
    rows, columns = scores.shape
    pairs = parse_targets(targets, rows, columns, scores.device)
    scores = as_float(scores)
    targets = dense_targets(pairs, rows, columns, scores.dtype, scores.device)
    return reduce(((scores - targets) ** 2).mean(1), reduction)

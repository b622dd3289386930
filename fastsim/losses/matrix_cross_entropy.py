"""Cross entropy of the row softmax of the score matrix against a target matrix.

    L_i = -sum_j t_ij log softmax_j(z_ij) = T_i lse_j z_ij - sum_j t_ij z_ij,
    z = s / temperature + candidate_bias_j,  T_i = sum_j t_ij

s is the cosine, or with similarity="dot" the dot product; candidate_bias as in `info_nce`.

Source: torch.nn.CrossEntropyLoss with class probabilities as target, applied to (S / temperature,
targets). The targets are not normalised, so that -1 pushes a pair apart. With one-hot targets it is
`info_nce`.
"""

from functools import partial

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction, Scalar, Similarity, Targets
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.backends.extras import extras_of
from fastsim.checks import (
    check_number,
    check_reduction,
    check_scores,
    check_sides,
    check_similarity,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.later_calls import given_targets, given_temperature
from fastsim.engine.prepared import once_per_signature
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Pairs,
    check_own_targets,
    dense_targets,
    gather_targets,
    global_targets,
    known_targets,
    parse_bias,
    parse_targets,
)
from fastsim.records import replaced
from fastsim.reduce import as_float, inverse, reduce
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss

_TILE = TileLoss("softmax", Pairs())


@embeddings_in_autocast("x", "y")
@once_per_signature
@batchwise
def matrix_cross_entropy(
    x: Tensor,
    y: Tensor,
    targets: Targets,
    *,
    temperature: Scalar = 1.0,
    candidate_bias: Tensor | None = None,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Cross entropy of the row softmax of the scores against a target matrix.

    For graded targets of every pair, or a teacher's scores. With target 1 for a row's positive and
    0 elsewhere it is `info_nce`; `matrix_mse` trains the values of the targets.

    Formula and source: fastsim/losses/matrix_cross_entropy.py.

    Args:
        x: (N, D).
        y: (M, D).
        targets: (N, M) of any real or integer dtype, 1 for similar pairs, -1 for others, or soft
            values between; or (row_groups (N,), column_groups (M,)), integers, with target 1 for
            equal groups, otherwise -1; or None: 1 on the diagonal, otherwise -1.
        temperature: a positive number or tensor of one, which may require a gradient.
        candidate_bias: (M,) numbers added to the logits of the rows of y; -log q_j for candidates
            sampled with probabilities q_j (see `info_nce`).
        similarity: the score, "cosine" or "dot" for the dot product without normalisation.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none".

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> rows, targets = torch.eye(2), torch.eye(2)
        >>> fastsim.matrix_cross_entropy(rows, rows, targets)  # log(e + 1) - 1
        tensor(0.3133)
    """
    check_sides("y", y, "x", x, empty=group is not None)
    check_reduction(reduction)
    check_similarity(similarity)
    chosen = pick(
        backend,
        x,
        y,
        targets,
        temperature,
        candidate_bias,
        kind="softmax",
        group=group,
        extras=extras_of(similarity=similarity, candidate_bias=candidate_bias),
    )
    check_number("temperature", temperature, positive=True)
    options = {"temperature": temperature}
    check_own_targets(targets, x, y, group)
    bias = parse_bias(candidate_bias, y.shape[0], x)
    batch = join(
        group,
        "matrix_cross_entropy",
        x,
        y,
        **options,
        targets=targets,
        candidate_bias=candidate_bias,
        similarity=similarity,
        reduction=reduction,
        backend=chosen.name,
    )
    targets = global_targets(targets, batch, x.device)
    options["candidate_bias"] = bias = batch.gather_columns(bias)
    if chosen.name == "eager":
        scores = dense_scores(*batch.gather_both(x, y), chosen, similarity)
        targets = gather_targets(targets, batch)
        losses = matrix_cross_entropy_from_scores(scores, targets, **options, reduction="none")
        return batch.reduce(losses, reduction)
    tile_of = partial(_tile, columns=batch.columns, bias=bias, cosine=similarity == "cosine")
    later = partial(tile_of, parse=known_targets)
    return tile_loss(
        x=x,
        y=y,
        **tile_of(x, targets),
        scale=inverse(temperature, x),
        given=given_targets(targets, later, given_temperature(temperature)),
        weights=batch.row_weights(reduction, x),
        batch=batch,
        backend=chosen,
        summed=True,
    )


def _tile(x, targets, *, columns, bias, cosine, parse=parse_targets):
    """The `TileLoss` for these targets, and its formula."""

    def formula(scores, scale, _):
        options = {"temperature": 1 / scale, "candidate_bias": bias, "reduction": "none"}
        return matrix_cross_entropy_from_scores(scores, targets, **options)

    pairs = parse(targets, x.shape[0], columns, x.device)
    pairs = replaced(pairs, column_bias=bias)
    return {"tile": replaced(_TILE, pairs=pairs, cosine=cosine), "formula": formula}


class MatrixCrossEntropy(LossModule):
    """The module of `matrix_cross_entropy`."""

    function = staticmethod(matrix_cross_entropy)

    def __init__(
        self,
        *,
        temperature: Scalar = 1.0,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def matrix_cross_entropy_from_scores(
    scores: Tensor,
    targets: Targets,
    *,
    temperature: Scalar = 1.0,
    candidate_bias: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `matrix_cross_entropy` for scores (N, M); other parameters as there."""
    check_scores("scores", scores)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    rows, columns = scores.shape
    pairs = parse_targets(targets, rows, columns, scores.device)
    bias = parse_bias(candidate_bias, columns, scores)
    logits = as_float(scores) / temperature
    log_probability = torch.log_softmax(logits if bias is None else logits + bias, 1)
    targets = dense_targets(pairs, rows, columns, log_probability.dtype, scores.device)
    return reduce(-(targets * log_probability).sum(1), reduction)

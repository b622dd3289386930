"""Cross entropy of the score matrix against a target matrix, row by row.

    L_i = -sum_j t_ij log softmax_j(z_ij) = T_i lse_j z_ij - sum_j t_ij z_ij,
    z = cos / temperature,  T_i = sum_j t_ij

Source: torch.nn.CrossEntropyLoss with class probabilities as target, applied to (S / temperature,
targets); the targets are taken as they are, so that -1 pushes a pair away. With one-hot targets
it is `info_nce`.
"""

import torch

from fastsim.backends import pick
from fastsim.checks import (
    check_alike,
    check_embeddings,
    check_number,
    check_reduction,
    check_scores,
)
from fastsim.engine import tile_loss
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float, reduce, row_weights
from fastsim.scores import compute_dtype, dense_cosines
from fastsim.targets import dense_targets, parse_targets
from fastsim.tiles import Tile


def matrix_cross_entropy(x, y, targets, *, temperature=1.0, reduction="mean", backend=None):
    """Cross entropy of the cosines of x (N, D) and y (M, D) against a target matrix.

    targets: (N, M) of any real or integer dtype; or (row_groups (N,), column_groups (M,))
        integers, the same group 1, else -1; or None: 1 on the diagonal, else -1.
    temperature: a positive number or 0-d tensor, with a gradient if it wants one.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit, RuntimeError for a backend that cannot serve them. Source: see the module.
    """
    check_embeddings("x", x)
    check_embeddings("y", y)
    check_alike("y", y, "x", x)
    check_reduction(reduction)
    chosen = pick(backend, x)
    if chosen.name == "eager":
        return matrix_cross_entropy_from_scores(
            dense_cosines(x, y, chosen), targets, temperature=temperature, reduction=reduction
        )
    pairs = parse_targets(targets, x.shape[0], y.shape[0], x.device)
    check_number("temperature", temperature, positive=True)
    return tile_loss(
        Tile("softmax", pairs),
        x,
        y,
        scale=1 / temperature,
        weights=row_weights(reduction, x.shape[0], compute_dtype(x), x.device),
        backend=chosen,
    )


class MatrixCrossEntropy(LossModule):
    """The module of `matrix_cross_entropy`."""

    function = staticmethod(matrix_cross_entropy)


def matrix_cross_entropy_from_scores(scores, targets, *, temperature=1.0, reduction="mean"):
    """The specification of `matrix_cross_entropy`: scores (N, M), the other parameters as there."""
    check_scores("scores", scores)
    check_number("temperature", temperature, positive=True)
    check_reduction(reduction)
    rows, columns = scores.shape
    pairs = parse_targets(targets, rows, columns, scores.device)
    log_probability = torch.log_softmax(as_float(scores) / temperature, 1)
    wanted = dense_targets(pairs, rows, columns, log_probability.dtype, scores.device)
    return reduce(-(wanted * log_probability).sum(1), reduction)

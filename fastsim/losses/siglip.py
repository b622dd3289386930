"""SigLIP: every pair of the batch as a binary decision.

    L = (1/N) sum_ij BCE(sigma(scale * cos_ij + bias), (t_ij + 1) / 2)
      = (1/N) sum_ij softplus(-t_ij z_ij)   for t = +-1

Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training", equation 1, there with
the diagonal as the only positives. The division is by N, not N^2; scale and bias start at 10 and
-10 so that the many negatives do not swamp the start: without them sigma of a cosine never
leaves 0.27 to 0.73.
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


def siglip(x, y, targets=None, *, scale=10.0, bias=-10.0, reduction="mean", backend=None):
    """Pairwise sigmoid loss of x (N, D) and y (M, D) against any target matrix.

    targets: (N, M) of any real or integer dtype, 1 similar, -1 not, soft values between; or
        (row_groups (N,), column_groups (M,)) integers, the same group 1, else -1; or None: the
        diagonal.
    scale, bias: numbers or 0-d tensors, with a gradient if they want one.

    Returns a scalar, or the row sums (N,) for reduction "none". ValueError or TypeError for
    arguments that do not fit, RuntimeError for a backend that cannot serve them. Source: see the
    module.
    """
    check_embeddings("x", x)
    check_embeddings("y", y)
    check_alike("y", y, "x", x)
    check_reduction(reduction)
    chosen = pick(backend, x)
    if chosen.name == "eager":
        scores = dense_cosines(x, y, chosen)
        return siglip_from_scores(scores, targets, scale=scale, bias=bias, reduction=reduction)
    pairs = parse_targets(targets, x.shape[0], y.shape[0], x.device)
    check_number("scale", scale)
    check_number("bias", bias)
    return tile_loss(
        Tile("sigmoid", pairs),
        x,
        y,
        scale=scale,
        bias=bias,
        weights=row_weights(reduction, x.shape[0], compute_dtype(x), x.device),
        backend=chosen,
    )


class SigLIP(LossModule):
    """The module of `siglip`."""

    function = staticmethod(siglip)


def siglip_from_scores(scores, targets=None, *, scale=10.0, bias=-10.0, reduction="mean"):
    """The specification of `siglip`: scores (N, M), the other parameters as there."""
    check_scores("scores", scores)
    check_number("scale", scale)
    check_number("bias", bias)
    check_reduction(reduction)
    rows, columns = scores.shape
    pairs = parse_targets(targets, rows, columns, scores.device)
    logits = as_float(scores) * scale + bias
    wanted = (dense_targets(pairs, rows, columns, logits.dtype, scores.device) + 1) / 2
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return reduce(losses.sum(1), reduction)

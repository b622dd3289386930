"""SigLIP: a binary classification of every pair of the batch.

    L = (1/N) sum_ij BCE(sigma(scale * s_ij + bias), (t_ij + 1) / 2)
      = (1/N) sum_ij softplus(-t_ij z_ij)   for t = +-1

s is the cosine, or with similarity="dot" the dot product. If rows have several positives, each may
get a weight v_ij <= 1. With k_i positives in its row and k'_j in its column:

    L = (1/N) sum_ij v_ij softplus(-t_ij z_ij),   v_ij = 1 for t_ij = -1, and for t_ij = 1
        1   or   1/k_i   or   (1/k_i + 1/k'_j) / 2     (positive_weight "one", "row", "both")

Source: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training", equation 1, where only the
diagonal is positive. The sum is divided by N, not N^2. scale and bias start at 10 and -10, so that
the many negatives do not dominate the first steps: sigma of a bare cosine stays between 0.27 and
0.73. The weights for several positives are those of SigLIP+ in siglip-kernel 0.1
(github.com/avocardio/siglip-kernel), whose loss is this one divided by M.
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from fastsim.annotations import Group, Reduction, Scalar, Similarity, Targets
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import get, pick
from fastsim.backends.extras import extras_of
from fastsim.checks import (
    check_choice,
    check_number,
    check_reduction,
    check_scores,
    check_sides,
    check_similarity,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.later_calls import Given, checked, given_targets
from fastsim.engine.prepared import once_per_signature
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    check_own_targets,
    dense_targets,
    gather_targets,
    global_targets,
    known_targets,
    parse_targets,
    positive_counts,
)
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float, reduce, softplus
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss

PositiveWeight = Literal["one", "row", "both"]
CHOICES = get_args(PositiveWeight)


@embeddings_in_autocast("x", "y")
@once_per_signature
@batchwise
def siglip(
    x: Tensor,
    y: Tensor,
    targets: Targets = None,
    *,
    scale: Scalar = 10.0,
    bias: Scalar = -10.0,
    positive_weight: PositiveWeight = "one",
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Pairwise sigmoid loss against any target matrix.

    For rows with several positives, and for image and text. Every pair is classified alone, without
    a softmax over the batch; `info_nce` has the softmax, for one positive per row.

    Formula and source: fastsim/losses/siglip.py.

    Args:
        x: (N, D).
        y: (M, D).
        targets: (N, M) of any real or integer dtype, 1 for similar pairs, -1 for others, or soft
            values between; or (row_groups (N,), column_groups (M,)), integers, with target 1 for
            equal groups, otherwise -1; or None: 1 on the diagonal, otherwise -1.
        scale, bias: numbers or tensors of one, which may require a gradient.
        positive_weight: the weight of a positive if targets are groups. "one": 1, as for a
            negative; "row": 1/k for k positives in its row, so that rows with many positives do not
            outweigh the others; "both": the mean of 1/k and 1/k' for k' positives in its column,
            which treats x and y alike. With `group` the positives of all ranks count.
        similarity: the score, "cosine" or "dot" for the dot product without normalisation.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, the sum over all pairs divided by N; or for reduction "none" the row sums (N,).

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> fastsim.siglip(torch.eye(2), torch.eye(2), scale=1.0, bias=0.0)  # log 2 + log(1 + 1/e)
        tensor(1.0064)
    """
    check_sides("y", y, "x", x, empty=group is not None)
    check_reduction(reduction)
    check_similarity(similarity)
    weighed = _is_weighed(positive_weight, targets)
    extras = extras_of(similarity=similarity, weighed=weighed)
    tensors = x, y, targets, scale, bias
    chosen = pick(backend, *tensors, kind="sigmoid", group=group, extras=extras)
    check_number("scale", scale)
    check_number("bias", bias)
    options = {"scale": scale, "bias": bias}
    check_own_targets(targets, x, y, group)
    batch = join(
        group,
        "siglip",
        x,
        y,
        **options,
        positive_weight=positive_weight,
        targets=targets,
        similarity=similarity,
        reduction=reduction,
        backend=chosen.name,
    )
    targets = global_targets(targets, batch, x.device)
    if chosen.name == "eager":
        scores = dense_scores(*batch.gather_both(x, y), chosen, similarity)
        options |= {"positive_weight": positive_weight, "reduction": "none"}
        losses = siglip_from_scores(scores, gather_targets(targets, batch), **options)
        return batch.reduce(losses, reduction)
    tile_of = partial(
        _tile,
        positive_weight=positive_weight if weighed else None,
        cosine=similarity == "cosine",
        batch=batch,
        backend=chosen,
    )
    later = partial(tile_of, parse=known_targets)
    return tile_loss(
        x=x,
        y=y,
        **tile_of(x, targets),
        scale=_off_zero(scale, x),
        bias=bias,
        given=given_targets(targets, later, _given_scalars(scale, bias)),
        weights=batch.row_weights(reduction, x),
        batch=batch,
        backend=chosen,
        summed=True,
    )


def _tile(x, targets, *, positive_weight, cosine, batch, backend, parse=parse_targets):
    """The `TileLoss` for these targets, and its formula.

    positive_weight: "row", "both", or None for weights of 1.
    """
    pairs = parse(targets, x.shape[0], batch.columns, x.device)
    weights = None
    if positive_weight is not None:
        all_rows = batch.gather_rows(pairs.row_groups)
        weights = _weights(pairs, all_rows, positive_weight, compute_dtype(x), backend)

    def formula(scores, scale, bias):
        return _losses(scores * scale + bias, pairs, weights)

    tile = TileLoss("sigmoid", pairs, cosine=cosine, positive_weights=weights)
    return {"tile": tile, "formula": formula}


def _given_scalars(scale, bias):
    """The `Given` of scale and bias."""
    given = {"scale": scale, "bias": bias}
    given = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    names = tuple(given)

    def fields(x, *tensors):
        values = {n: checked(n, t, x) for n, t in zip(names, tensors, strict=True)}
        if "scale" in values:
            values["scale"] = _off_zero(values["scale"], x)
        return values

    return Given(tuple(given.values()), fields, names)


class SigLIP(LossModule):
    """The module of `siglip`."""

    function = staticmethod(siglip)

    def __init__(
        self,
        *,
        scale: Scalar = 10.0,
        bias: Scalar = -10.0,
        positive_weight: PositiveWeight = "one",
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def _off_zero(scale, x):
    """The scale, but 1e-20 for a learnt scale of 0, because its gradient divides by the scale.

    1e-20 is too small to change a logit or a sum in float32.
    """
    if not (isinstance(scale, torch.Tensor) and scale.requires_grad):
        return scale
    scale = scale.to(compute_dtype(x))
    return scale + 1e-20 * (scale == 0)


def siglip_from_scores(
    scores: Tensor,
    targets: Targets = None,
    *,
    scale: Scalar = 10.0,
    bias: Scalar = -10.0,
    positive_weight: PositiveWeight = "one",
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `siglip` for scores (N, M), with the same other parameters."""
    check_scores("scores", scores)
    check_number("scale", scale)
    check_number("bias", bias)
    check_reduction(reduction)
    rows, columns = scores.shape
    pairs = parse_targets(targets, rows, columns, scores.device)
    logits, weights = as_float(scores) * scale + bias, None
    if _is_weighed(positive_weight, targets):
        weights = _weights(pairs, pairs.row_groups, positive_weight, logits.dtype, get("eager"))
    return reduce(_losses(logits, pairs, weights), reduction)


def _losses(logits, pairs, weights):
    """(N,) the sums over the rows; weights: (N,) the weight of each row's positives, or None."""
    target = (dense_targets(pairs, *logits.shape, logits.dtype, logits.device) + 1) / 2
    # Not binary_cross_entropy_with_logits: its gradient sigma(z) - target cancels for large z.
    losses = (1 - target) * softplus(logits) + target * softplus(-logits)
    if weights is not None:
        losses = losses * torch.where(target > 0, weights[:, None], 1.0)
    return losses.sum(1)


def _is_weighed(positive_weight, targets):
    """Whether positives may have weights other than 1; on a diagonal each is the only one."""
    check_choice("positive_weight", positive_weight, CHOICES)
    if positive_weight != "one" and isinstance(targets, Tensor):
        raise ValueError(
            f"positive_weight: wanted 'one' with a matrix of targets, got {positive_weight!r};"
            " groups as targets have the others"
        )
    return positive_weight != "one" and targets is not None


def _weights(pairs, all_rows, positive_weight, dtype, backend):
    """(N,) the weight of each row's positives. all_rows: the groups of the rows of all ranks.

    A weight for each row suffices: all columns of its group have equally many positives.
    """
    row_weights = positive_counts(pairs, backend).clamp(min=1).to(dtype).reciprocal()
    if positive_weight == "row":
        return row_weights
    rows_of_group = backend.equal_counts(pairs.row_groups, all_rows)
    return 0.5 * (rows_of_group.to(dtype).reciprocal() + row_weights)

"""CoSENT over all pairs of entries of the score matrix.

    L = log(1 + sum_{t_p > t_q} exp(scale * (s_q - s_p))),   p, q entries of the N x M matrix

The levels are the K distinct targets in ascending order. With A_l the log-sum-exp (lse) of the
logits of level l, and B_l that of the negated logits, L = lse(0, {B_l + lse_{m<l} A_m}). This takes
2K running sums instead of (N M)^2 pairs, and the score gradient of an entry needs only these sums.
For two levels L = softplus(A_0 + B_1).

Source: Su Jianlin 2022 (see `cosent`), applied to all in-batch pairs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fastsim.annotations import Group, Scalar, Similarity, Targets
from fastsim.autocast import embeddings_in_autocast
from fastsim.backends import pick
from fastsim.backends.bands import numbers_of_a_band
from fastsim.backends.extras import extras_of
from fastsim.checks import (
    FLOATING,
    can_be_read,
    check_alike,
    check_device,
    check_embeddings,
    check_number,
    check_scores,
    check_similarity,
    check_tensor,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.losses.cosent import cosent
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    dense_targets,
    gather_targets,
    global_targets,
    parse_own_targets,
    parse_targets,
)
from fastsim.precision import compute_dtype
from fastsim.reduce import as_float
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss

BAND = 1 << 20  # targets that are read at once on a CPU


@embeddings_in_autocast("x", "y")
@batchwise
def cosent_matrix(
    x: Tensor,
    y: Tensor | None,
    targets: Targets,
    *,
    scale: Scalar = 20.0,
    similarity: Similarity = "cosine",
    levels: Tensor | None = None,
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """CoSENT over all pairs of entries of the score matrix, in the order of a target matrix.

    For a graded target of every pair of the batch. For a list of pairs with labels use `cosent`; to
    train the values of the targets instead of their order use `matrix_mse`.

    Formula and source: fastsim/losses/cosent_matrix.py.

    Args:
        x: (N, D).
        y: (M, D); None: x with itself, each unordered pair once, the diagonal left out.
        targets: (N, M) of any real or integer dtype, none of them NaN; or (row_groups (N,),
            column_groups (M,)), integers, with target 1 for equal groups, otherwise -1; or None:
            the diagonal.
        scale: a positive number or tensor of one, which may require a gradient.
        similarity: the score, "cosine" or "dot" for the dot product without normalisation.
        levels: (K,) the distinct values of a target matrix in ascending order, as floating-point
            numbers; None: computed from the targets, which waits for a GPU. The loss is NaN if a
            target is not among the levels, or if levels on a GPU are not sorted.
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar. With up to 256 distinct targets no N x M tensor but the targets is held; with more
        the entries are sorted, which takes O(N M) memory.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> ones = torch.ones(2, 3)
        >>> fastsim.cosent_matrix(ones, ones, None)  # equal scores: log(1 + 2 x 2)
        tensor(1.6094)
    """
    check_embeddings("x", x, empty=group is not None)
    if y is not None:
        check_embeddings("y", y, empty=group is not None)
        check_alike("y", y, "x", x)
    extras = extras_of(similarity=similarity, group=group)
    tensors = x, y, targets, scale, levels
    chosen = pick(backend, *tensors, kind="levels", group=group, extras=extras)
    check_number("scale", scale, positive=True)
    check_similarity(similarity)
    skip = "lower" if y is None else "nothing"
    pairs = parse_own_targets(targets, x, x if y is None else y, group, skip=skip)
    if levels is not None:
        levels = _checked_levels(levels, x)
    given_levels = None if levels is None else levels.shape[0]
    unknown = None  # only levels that the caller gives may lack a target
    if levels is None or pairs.dense is None:
        levels = _levels(pairs, compute_dtype(x), x.device)
    else:
        unknown = _unknown(pairs.dense, levels)
    batch = join(
        group,
        "cosent_matrix",
        x,
        x if y is None else y,
        scale=scale,
        targets=targets,
        each_pair_once=y is None,
        levels=given_levels,
        similarity=similarity,
        backend=chosen.name,
    )
    if group is not None:
        targets = global_targets(targets, batch, x.device)
        pairs = parse_targets(targets, x.shape[0], batch.columns, x.device, skip=skip)
        if unknown is None and pairs.dense is not None:
            levels = batch.gather_values(levels).unique()
    if chosen.name != "eager" and levels.numel() <= chosen.most_levels:
        pairs = replace(pairs, offset=batch.first_column)
        tile = TileLoss("levels", pairs, levels=levels, cosine=similarity == "cosine")
        loss = _by_levels(tile, x, y, scale, batch, chosen)
    else:
        sides = batch.gather_both(x, x if y is None else y)
        scores = dense_scores(*sides, chosen, similarity)
        pairs = parse_targets(gather_targets(targets, batch), *scores.shape, x.device, skip=skip)
        loss = _over_entries(scores, pairs, scale, chosen.name)
    if unknown is None:
        return loss
    return loss + torch.zeros_like(loss).masked_fill(batch.total(unknown) > 0, torch.nan)


def _by_levels(tile, x, y, scale, batch, backend):
    """The loss from the sums of each level, by the passes of the engine."""
    pairs = tile.pairs
    return tile_loss(
        tile,
        x,
        y,
        scale=scale,
        weights=None,
        batch=batch,
        formula=lambda scores, scale, _: _over_entries(scores, pairs, scale, "eager"),
        backend=backend,
    )


class CoSENTMatrix(LossModule):
    """The module of `cosent_matrix`."""

    function = staticmethod(cosent_matrix)

    def __init__(
        self,
        *,
        scale: Scalar = 20.0,
        similarity: Similarity = "cosine",
        levels: Tensor | None = None,
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


def cosent_matrix_from_scores(
    scores: Tensor, targets: Targets, *, scale: Scalar = 20.0, each_pair_once: bool = False
) -> Tensor:
    """The specification of `cosent_matrix` for scores (N, M), with the same other parameters.

    each_pair_once: whether to use only the entries above the diagonal, as `cosent_matrix` does for
        y=None.
    """
    check_scores("scores", scores)
    check_number("scale", scale, positive=True)
    skip = "lower" if each_pair_once else "nothing"
    pairs = parse_targets(targets, *scores.shape, scores.device, skip=skip)
    return _over_entries(scores, pairs, scale, "eager")


def _over_entries(scores, pairs, scale, backend):
    """CoSENT of the entries of scores (N, M) that count, as one list."""
    targets = dense_targets(pairs, *scores.shape, compute_dtype(scores), scores.device)
    scores = _entries(as_float(scores), pairs)
    if not scores.numel():
        return (scores * scale).sum()
    return cosent(scores, _entries(targets, pairs), scale=scale, backend=backend)


def _entries(matrix, pairs):
    """The entries (E,) that count. E follows from the shape, so torch.compile can trace it."""
    if pairs.skip == "nothing":
        return matrix.flatten()
    rows, columns = torch.triu_indices(*matrix.shape, 1, device=matrix.device)
    return matrix[rows, columns]


def _bands(dense):
    """The matrix in bands of rows, so that temporary tensors stay small."""
    return dense.split(max(1, numbers_of_a_band(dense.device, BAND) // dense.shape[1]))


def _checked_levels(levels, x):
    """The levels in the compute type; ValueError on a CPU if they do not ascend."""
    check_tensor("levels", levels, ndim=1, dtypes=FLOATING, what="floating-point values (K,)")
    check_device("levels", levels, "x", x)
    levels = levels.to(compute_dtype(x)).contiguous()
    if can_be_read(levels) and (levels.isnan().any() or not (levels.diff() > 0).all()):
        raise ValueError(
            "levels: wanted distinct values in ascending order, got"
            f" {', '.join(f'{value:g}' for value in levels[:8].tolist())}"
            + (", ..." if len(levels) > 8 else "")
        )
    return levels


def _unknown(dense, levels):
    """How many targets are not among the levels, plus how many levels do not ascend: () int64.

    Does not wait for the device.
    """
    count = (~(levels.diff() > 0)).sum()
    for band in _bands(dense):
        targets = band.to(levels.dtype)
        place = torch.searchsorted(levels, targets.contiguous()).clamp(max=len(levels) - 1)
        count += (levels[place] != targets).sum()
    return count


def _levels(pairs, dtype, device):
    """The distinct targets (K,) in ascending order."""
    if pairs.dense is None:
        # Created on the device: a copy from the host would wait for it.
        return torch.linspace(pairs.negative_target, 1.0, 2, dtype=dtype, device=device)
    dense = pairs.dense
    # In the compute type at once: autocast refuses to concatenate the other 16-bit type.
    levels = torch.cat([band.unique().to(dtype) for band in _bands(dense)]).unique()
    if levels.isnan().any():
        raise ValueError("targets: wanted targets that can be ordered, got NaN")
    return levels

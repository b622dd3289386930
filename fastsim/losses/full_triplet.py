"""The modified ("full") triplet loss: a hinge on the mean negative and one on the closest.

    L_i = relu(mean_{j != i} s_ij - s_ii + margin) + relu(closest_i - s_ii + margin)
    semi-hard: closest_i = max{s_ij : j != i, s_ij <= s_ii};  hard: max{s_ij : j != i}

Source: the Siamese network of the Trax library and its course, after Schroff et al. 2015
(FaceNet), section 3.2 for semi-hard mining; mining="hard" is the common variant with the largest
off-diagonal score. The mean is a product with the sum of all candidates, without a pass over N x M.
The closest negative needs one pass, only in the forward pass; its gradient goes to one candidate
per row.
"""

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Group, Mining, Reduction
from fastsim.autocast import embeddings_in_autocast
from fastsim.batch_metrics import empty_row_metrics, in_metrics, not_compiled, record
from fastsim.checks import check_choice, check_number, check_reduction
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.one_call import one_call_serves
from fastsim.engine.prepared import once_per_signature
from fastsim.engine.selection import closest_column, selected_rows
from fastsim.losses.module import LossModule
from fastsim.losses.negatives import MININGS, checked_backend, largest_of, mean_of, negatives_of
from fastsim.losses.triplet_terms import terms_of_ring, terms_of_rows, units
from fastsim.pairs import Pairs, global_exclude, global_positives, parse_exclude, parse_positives
from fastsim.reduce import reduce
from fastsim.scores import dense_cosines
from fastsim.tile_loss import TileLoss


@embeddings_in_autocast("anchors", "positives")
@once_per_signature
@batchwise
def full_triplet(
    anchors: Tensor,
    positives: Tensor,
    *,
    margin: float = 0.25,
    mining: Mining = "semi-hard",
    exclude: Exclude = None,
    reduction: Reduction = "mean",
    group: Group = None,
    backend: str | None = None,
) -> Tensor:
    """Mean-negative and closest-negative triplet loss on cosines.

    For pairs, to train a margin instead of a softmax (`info_nce`). For rows with class labels use
    `batch_hard_triplet`.

    Formula and source: fastsim/losses/full_triplet.py.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N; column i is the positive of row i, all others are its negatives.
        margin: a number, by how much the positive should be closer than a negative.
        mining: "semi-hard", the closest negative that is not closer than the positive; or "hard",
            the closest of all negatives.
        exclude: (row_ids (N,), column_ids (M,)), integers. A pair with equal ids is left out unless
            it is the anchor's positive.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". A term is 0 for a row without a negative for it.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> anchors, positives = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> fastsim.full_triplet(anchors, positives, margin=0.5, reduction="none")
        tensor([1., 1.])
    """
    chosen = checked_backend(
        anchors, positives, mining, backend, exclude=exclude, margin=margin, group=group
    )
    check_reduction(reduction)
    check_number("margin", margin)
    options = {"margin": margin, "mining": mining}
    own = anchors.shape[0], positives.shape[0], anchors.device
    diagonal, ids = parse_positives(None, *own), parse_exclude(exclude, *own)
    batch = join(
        group,
        "full_triplet",
        anchors,
        positives,
        **options,
        exclude=exclude,
        reduction=reduction,
        backend=chosen.name,
    )
    pairs = Pairs(global_positives(diagonal, batch), *global_exclude(ids, batch))
    if chosen.name == "eager":
        scores, exclude = _positives_first(anchors, positives, pairs, batch, chosen)
        losses = full_triplet_from_scores(scores, **options, exclude=exclude, reduction="none")
        return batch.reduce(losses, reduction)
    weights = batch.row_weights(reduction, anchors)
    tile = TileLoss(f"{mining}_triplet", pairs, margin=margin)
    if not _one_call_serves(tile, anchors, positives, weights, batch, chosen):
        terms = _terms(anchors, positives, mining, pairs, batch, chosen)
        return batch.reduce(_hinges(*terms, margin), reduction)

    def formula(scores, *_):
        more = {"exclude": exclude, "reduction": "none"}
        return full_triplet_from_scores(scores, **options, **more)

    return tile_loss(
        tile,
        anchors,
        positives,
        scale=1,
        weights=weights,
        batch=batch,
        formula=formula,
        backend=chosen,
    )


def _one_call_serves(tile, anchors, positives, weights, batch, backend):
    """Whether one call of the backend computes the loss, with scores and score gradients."""
    shape = anchors.shape[0], batch.columns, anchors.shape[1]
    # A learnt margin, a ring, or symbolic sizes of torch.export need `_terms`.
    if batch.ring or isinstance(tile.margin, torch.Tensor):
        return False
    if not all(isinstance(size, int) for size in shape):
        return False
    arguments = tile, *shape, positives is anchors, anchors.dtype, weights, backend
    return one_call_serves(*arguments, with_metrics=in_metrics())


def _terms(anchors, positives, mining, pairs, batch, backend):
    """(the scores of the positives, the mean and the closest negative scores), (N,) each.

    A pass over the scores selects the closest negatives; their gradients need no such pass.
    """
    row_metrics = None
    if in_metrics():
        not_compiled()
        row_metrics = empty_row_metrics(anchors.shape[0], anchors.device)
    if batch.ring:
        terms = terms_of_ring(anchors, positives, mining, pairs, batch, backend, row_metrics)
    else:
        columns = batch.gather_columns(positives)
        unit_x, unit_y = units(anchors, columns, backend)
        sides = selected_rows(anchors, unit_x, backend), selected_rows(columns, unit_y, backend)
        indices = closest_column(
            *sides, anchors.dtype, mining == "semi-hard", pairs, backend, row_metrics
        )
        terms = terms_of_rows(unit_x, unit_y, indices, pairs, backend, batch.first_column)
    if row_metrics is not None:
        other = None if positives is anchors else positives
        record(row_metrics, anchors, other, cosine=True, batch=batch, backend=backend)
    return terms


class FullTriplet(LossModule):
    """The module of `full_triplet`."""

    function = staticmethod(full_triplet)

    def __init__(
        self,
        *,
        margin: float = 0.25,
        mining: Mining = "semi-hard",
        reduction: Reduction = "mean",
        group: Group = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(locals())


# ---- the specification ----


def full_triplet_from_scores(
    scores: Tensor,
    *,
    margin: float = 0.25,
    mining: Mining = "semi-hard",
    exclude: Exclude = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `full_triplet` for scores (N, M), with the same other parameters."""
    check_number("margin", margin)
    check_choice("mining", mining, MININGS)
    check_reduction(reduction)
    scores, negative = negatives_of(scores, exclude)
    mean = mean_of(scores, negative)
    closest, _ = largest_of(scores, negative, mining)
    return reduce(_hinges(scores.diagonal(), mean, closest, margin), reduction)


def _hinges(positive, mean, closest, margin):
    return torch.relu(mean - positive + margin) + torch.relu(closest - positive + margin)


def _positives_first(anchors, positives, pairs, batch, backend):
    """(scores of all ranks, exclude), with the positives of all ranks before the other columns."""
    scores = dense_cosines(*batch.gather_both(anchors, positives), backend)
    if batch.group is None:
        return scores, None if pairs.row_ids is None else (pairs.row_ids, pairs.column_ids)
    own = batch.gather_rows(pairs.positives)
    others = torch.ones(batch.columns, dtype=torch.bool, device=own.device)
    others[own] = False
    order = torch.cat([own, others.nonzero()[:, 0]])
    if pairs.row_ids is None:
        return scores[:, order], None
    return scores[:, order], (batch.gather_rows(pairs.row_ids), pairs.column_ids[order])

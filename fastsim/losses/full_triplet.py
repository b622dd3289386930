"""The modified ("full") triplet loss: the mean and the closest negative, both with a margin.

    L_i = relu(mean_{j != i} s_ij - s_ii + margin) + relu(closest_i - s_ii + margin)
    semi-hard: closest_i = max{s_ij : j != i, s_ij <= s_ii};  hard: max{s_ij : j != i}

Source: the Siamese network of the Trax library and its course, after Schroff et al. 2015
(FaceNet), section 3.2 for semi-hard mining; the common variant that takes the hardest off-diagonal
score as the closest is mining="hard". The mean is a product with the sum of all candidates, which
needs no pass over N x M. The closest negative needs one, in the forward pass alone; its gradient
reaches one candidate per row.
"""

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Group, Mining, Reduction
from fastsim.autocast import embeddings_in_autocast
from fastsim.batch_metrics import not_compiled, nothing_seen, record, watched
from fastsim.checks import check_choice, check_number, check_reduction
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.one_call import takes_whole
from fastsim.engine.prepared import once_per_signature
from fastsim.engine.selection import closest_column, selected_rows
from fastsim.losses.module import LossModule
from fastsim.losses.negatives import MININGS, checked_backend, largest_of, mean_of, negatives_of
from fastsim.losses.triplet_terms import terms_of_ring, terms_of_rows, units
from fastsim.pairs import Pairs, global_exclude, global_positives, parse_exclude, parse_positives
from fastsim.reduce import reduce
from fastsim.scores import dense_cosines
from fastsim.tile import Tile


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

    For pairs, where a margin is wanted rather than a softmax (`info_nce`). For rows with class
    labels take `batch_hard_triplet`.

    Formula and source: fastsim/losses/full_triplet.py.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N: row i's positive is column i, every other column a negative.
        margin: a number, how much closer the positive should be than a negative.
        mining: "semi-hard", the closest negative that is no closer than the positive; or "hard",
            the closest of all.
        exclude: (row_ids (N,), column_ids (M,)) integers; a pair with equal ids that is not the
            anchor's positive takes no part.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        A scalar, or (N,) for reduction "none". A row without a negative adds 0 to its term.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

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
    tile = Tile(f"{mining}_triplet", pairs, margin=margin)
    shape = anchors.shape[0], batch.columns, anchors.shape[1]
    # A margin to learn, a ring, and sizes that torch.export holds as symbols take the general way.
    plain = (
        not batch.ring
        and not isinstance(margin, torch.Tensor)
        and all(isinstance(n, int) for n in shape)
    )
    together, dtype = positives is anchors, anchors.dtype
    if plain and takes_whole(tile, *shape, together, dtype, weights, chosen, observed=watched()):

        def formula(scores, *_):
            given = options | {"exclude": exclude, "reduction": "none"}
            return full_triplet_from_scores(scores, **given)

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
    seen = None
    if watched():
        not_compiled()
        seen = nothing_seen(anchors.shape[0], anchors.device)
    if batch.ring:
        terms = terms_of_ring(anchors, positives, mining, pairs, batch, chosen, seen)
    else:
        columns = batch.gather_columns(positives)
        unit_x, unit_y = units(anchors, columns, chosen)
        sides = selected_rows(anchors, unit_x, chosen), selected_rows(columns, unit_y, chosen)
        indices = closest_column(*sides, anchors.dtype, mining == "semi-hard", pairs, chosen, seen)
        terms = terms_of_rows(unit_x, unit_y, indices, pairs, chosen, batch.first_column)
    if seen is not None:
        other = None if positives is anchors else positives
        record(seen, anchors, other, cosine=True, batch=batch, backend=chosen)
    return batch.reduce(_hinges(*terms, margin), reduction)


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


# ---- the specification on a given score matrix ----


def full_triplet_from_scores(
    scores: Tensor,
    *,
    margin: float = 0.25,
    mining: Mining = "semi-hard",
    exclude: Exclude = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The specification of `full_triplet`: scores (N, M), the other parameters as there."""
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
    """(scores of all ranks, exclude), the positives of all ranks before the other columns."""
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

"""The modified ("full") triplet loss: the mean and the closest negative, both with a margin.

    L_i = relu(mean_{j != i} s_ij - s_ii + margin) + relu(closest_i - s_ii + margin)
    semi-hard: closest_i = max{s_ij : j != i, s_ij <= s_ii};  hard: max{s_ij : j != i}

Source: the Siamese network of the Trax library and its course, after Schroff et al. 2015
(FaceNet), section 3.2 for semi-hard mining; the circulating form with "closest = hardest
off-diagonal" is mining="hard". The mean is a product with the sum of all candidates, so no pass
over N x M; the closest is one, forward only, and its gradient touches one candidate a row.
"""

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Group, Mining, Reduction
from fastsim.backends import pick
from fastsim.backends.rows import add_rows
from fastsim.batch_metrics import not_compiled, nothing_seen, record, watched
from fastsim.checks import (
    check_choice,
    check_columns,
    check_enough,
    check_number,
    check_reduction,
    check_scores,
    check_sides,
)
from fastsim.distributed import batchwise, join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.chosen_rows import row_terms
from fastsim.engine.passes import takes_whole
from fastsim.engine.prepared import once_per_signature
from fastsim.engine.ring import ring_closest, ring_sum
from fastsim.engine.selection import closest_column
from fastsim.losses.module import LossModule
from fastsim.pairs import (
    Pairs,
    global_exclude,
    global_positives,
    pair_mask,
    parse_exclude,
    parse_positives,
)
from fastsim.reduce import as_float, below_every_score, reduce
from fastsim.scores import dense_cosines, paired, unit_rows, without_autocast
from fastsim.tile import Tile

MININGS = ("semi-hard", "hard")


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

    For pairs, where a margin is wanted rather than a softmax (`info_nce`). Rows with class labels
    have `batch_hard_triplet`.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N: row i's positive is column i, every other column a negative.
        margin: a number, by how much the positive is to be closer than a negative.
        mining: "semi-hard", the closest negative no closer than the positive, or "hard".
        exclude: (row_ids (N,), column_ids (M,)) integers; a pair with equal ids that is not the
            anchor's positive takes no part.
        reduction: "mean", "sum" or "none".
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`.
        backend: its name; None chooses.

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
    chosen = _check(anchors, positives, mining, backend, margin, group)
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
    # A margin to learn, or sizes that are symbols of torch.export, go the way that takes any.
    number = (
        not batch.ring
        and not isinstance(margin, torch.Tensor)
        and all(isinstance(n, int) for n in shape)
    )
    rows = positives is anchors, anchors.dtype
    if number and takes_whole(tile, *shape, *rows, weights, chosen, observed=watched()):

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
        terms = _ring_terms(anchors, positives, mining, pairs, batch, chosen, seen)
    else:
        unit_x, unit_y = _units(anchors, batch.gather_columns(positives), chosen)
        semi_hard = mining == "semi-hard"
        indices = closest_column(unit_x, unit_y, anchors.dtype, semi_hard, pairs, chosen, seen)
        terms = _terms(unit_x, unit_y, indices, pairs, chosen, batch.first_column)
    if seen is not None:
        other = None if positives is anchors else positives
        record(seen, anchors, other, cosine=True, batch=batch, backend=chosen)
    return batch.reduce(_hinges(*terms, margin), reduction)


def mean_negative(anchors: Tensor, positives: Tensor, *, backend: str | None = None) -> Tensor:
    """Mean cosine of each anchor with the other columns: column i is row i's positive.

    A part of `full_triplet`, for a loss of your own. It takes O((N + M) D), without any score.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N.
        backend: its name; None chooses.

    Returns:
        (N,), differentiable; -inf where there is no other column.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> fastsim.mean_negative(torch.eye(2), torch.eye(2))
        tensor([0., 0.])
    """
    chosen = _check(anchors, positives, "hard", backend)
    if chosen.name == "eager":
        return mean_negative_from_scores(dense_cosines(anchors, positives, chosen))
    unit_x, unit_y = _units(anchors, positives, chosen)
    pairs = _pairs(None, anchors.shape[0], positives.shape[0], anchors.device)
    return _terms(unit_x, unit_y, torch.full_like(pairs.positives, -1), pairs, chosen)[1]


def closest_negative(
    anchors: Tensor, positives: Tensor, *, mining: Mining = "semi-hard", backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The closest negative of each anchor: column i is row i's positive.

    A part of `full_triplet`, for a loss of your own. `top_k` finds the best of a whole corpus.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N.
        mining: "semi-hard", the largest cosine not above the positive's, or "hard", the largest.
        backend: its name; None chooses.

    Returns:
        (values (N,), indices (N,)), the values differentiable. A row with no such negative has
        value -inf and index -1, one with a score that is not finite the value NaN.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> fastsim.closest_negative(torch.eye(2), torch.eye(2))
        (tensor([0., 0.]), tensor([1, 0]))
    """
    chosen = _check(anchors, positives, mining, backend)
    if chosen.name == "eager":
        return closest_negative_from_scores(
            dense_cosines(anchors, positives, chosen), mining=mining
        )
    unit_x, unit_y = _units(anchors, positives, chosen)
    pairs = _pairs(None, anchors.shape[0], positives.shape[0], anchors.device)
    indices = closest_column(unit_x, unit_y, anchors.dtype, mining == "semi-hard", pairs, chosen)
    with without_autocast(unit_x.device.type):
        sums = torch.mv(unit_x.detach(), unit_y.detach().sum(0))
    return _terms(unit_x, unit_y, indices, pairs, chosen)[2] + 0 * sums, indices


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
    scores, negative = _negatives(scores, exclude)
    mean = _mean_of(scores, negative)
    closest, _ = _largest_of(scores, negative, mining)
    return reduce(_hinges(scores.diagonal(), mean, closest, margin), reduction)


def mean_negative_from_scores(scores: Tensor, *, exclude: Exclude = None) -> Tensor:
    """The specification of `mean_negative`: scores (N, M) -> (N,)."""
    return _mean_of(*_negatives(scores, exclude))


def closest_negative_from_scores(
    scores: Tensor, *, mining: Mining = "semi-hard", exclude: Exclude = None
) -> tuple[Tensor, Tensor]:
    """The specification of `closest_negative`: scores (N, M) -> (values, indices), both (N,)."""
    check_choice("mining", mining, MININGS)
    values, indices = _largest_of(*_negatives(scores, exclude), mining)
    return values + 0 * as_float(scores).sum(1), indices


def _negatives(scores, exclude):
    """The scores as floats and the (N, M) bool matrix of negatives."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    check_columns(scores)
    pairs = _pairs(exclude, rows, columns, scores.device)
    negative = pair_mask(pairs, rows, columns, scores.device)
    return as_float(scores), negative.scatter(1, pairs.positives[:, None], False)


def _mean_of(scores, negative):
    count = negative.sum(1)
    mean = (scores * negative).sum(1) / count.clamp(min=1)
    return torch.where(count > 0, mean, -torch.inf)


def _largest_of(scores, negative, mining):
    if mining == "semi-hard":
        negative = negative & (scores <= scores.diagonal()[:, None])
    values, indices = scores.masked_fill(~negative, below_every_score(scores)).max(1)
    some = negative.any(1)
    return torch.where(some, values, -torch.inf), torch.where(some, indices, -1)


# ---- the same without the score matrix ----


def _hinges(positive, mean, closest, margin):
    return torch.relu(mean - positive + margin) + torch.relu(closest - positive + margin)


def _terms(unit_x, unit_y, indices, pairs, backend, first=0):
    """Positive, mean negative and closest negative of each row, -inf where it has none.

    first: the column of the first row's positive.
    """
    (positive, closest), sums = row_terms(unit_x, unit_y, indices, first, backend)
    excluded = ()
    if pairs.row_ids is not None:
        excluded = _excluded_scores(unit_x, unit_y, pairs)
    mean = _mean(positive, sums, excluded, pairs, unit_y.shape[0])
    return positive, mean, torch.where(indices >= 0, closest, -torch.inf)


def _ring_terms(anchors, positives, mining, pairs, batch, backend, seen):
    """The same where the rank's own columns travel."""
    unit_x, unit_y = _units(anchors, positives, backend)
    semi_hard = mining == "semi-hard"
    indices = ring_closest(unit_x, unit_y, anchors.dtype, semi_hard, pairs, batch, backend, seen)

    def of_block(unit_x, unit_y, columns):
        within = indices - columns.start
        here = (within >= 0) & (within < len(unit_y))
        closest = paired(unit_x, unit_y[within.clamp(0, len(unit_y) - 1)])
        parts = [torch.mv(unit_x, unit_y.sum(0)), torch.where(here, closest, 0.0)]
        if pairs.row_ids is not None:
            parts += _excluded_scores(unit_x, unit_y, pairs.of_columns(columns))
        return parts

    with without_autocast(unit_x.device.type):
        sums, closest, *excluded = ring_sum(of_block, unit_x, unit_y, batch)
    positive = paired(unit_x, unit_y[: len(unit_x)])
    mean = _mean(positive, sums, excluded, pairs, batch.columns)
    return positive, mean, torch.where(indices >= 0, closest, -torch.inf)


def _mean(positive, sums, excluded, pairs, columns):
    """The mean negative from the sum of all scores of the row and of those with its id."""
    sums = sums - positive
    counts = torch.full_like(positive, columns - 1)
    if excluded:
        scores, hits = excluded
        # The positive has its own id among them when its column carries the row's id.
        own = pairs.column_ids[pairs.positives] == pairs.row_ids
        sums = sums - scores + torch.where(own, positive, 0.0)
        counts = counts - hits + own
    return torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)


def _excluded_scores(unit_x, unit_y, pairs):
    """Per row, the sum of its scores with the columns of its id, and their number, both (N,)."""
    sums, counts = _excluded_sums(unit_y, pairs)
    return paired(unit_x, sums), counts


def _excluded_sums(unit_y, pairs):
    """Per row, the sum of the columns with its id (N, D) and their number (N,)."""
    # A sort and a search: torch.unique would wait for a GPU to tell it how many ids there are.
    ids = pairs.column_ids.sort().values
    group = torch.searchsorted(ids, pairs.column_ids)
    sums = add_rows(torch.zeros_like(unit_y), group, unit_y)
    ones = unit_y.new_ones(group.shape)
    counts = add_rows(torch.zeros_like(ones), group, ones)
    row_group = torch.searchsorted(ids, pairs.row_ids).clamp(max=ids.numel() - 1)
    known = (ids[row_group] == pairs.row_ids).to(unit_y.dtype)
    return sums[row_group] * known[:, None], counts[row_group] * known


def _units(anchors, positives, backend):
    unit_x = unit_rows(anchors, backend)
    return unit_x, unit_x if positives is anchors else unit_rows(positives, backend)


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


def _pairs(exclude, rows, columns, device):
    row_ids, column_ids = parse_exclude(exclude, rows, columns, device)
    return Pairs(torch.arange(rows, device=device), row_ids, column_ids)


def _check(anchors, positives, mining, backend, margin=None, group=None):
    check_sides("positives", positives, "anchors", anchors, empty=group is not None)
    check_enough("positives", positives, "anchors", anchors)
    check_choice("mining", mining, MININGS)
    return pick(backend, anchors, positives, margin, kind="closest", group=group)

"""The mean and the closest negative of each row, the terms of `full_triplet`, as functions.

    mean_i = mean_{j != i} s_ij
    closest_i = max{s_ij : j != i, s_ij <= s_ii} (semi-hard), max{s_ij : j != i} (hard)

The mean is a product with the sum of all candidates, which needs no pass over N x M. The closest
negative needs one, in the forward pass alone; its gradient reaches one candidate per row.

Source: that of `full_triplet`, fastsim/losses/full_triplet.py.
"""

import torch
from torch import Tensor

from fastsim.annotations import Exclude, Mining
from fastsim.autocast import embeddings_in_autocast, without_autocast
from fastsim.backends import pick
from fastsim.checks import check_choice, check_columns, check_enough, check_scores, check_sides
from fastsim.engine.selection import closest_column, selected_rows
from fastsim.losses.triplet_terms import terms_of_rows, units
from fastsim.pairs import Pairs, pair_mask, parse_exclude
from fastsim.reduce import as_float, below_every_score
from fastsim.scores import dense_cosines
from fastsim.ties import highest_equal, size_of_rows

MININGS = ("semi-hard", "hard")


@embeddings_in_autocast("anchors", "positives")
def mean_negative(anchors: Tensor, positives: Tensor, *, backend: str | None = None) -> Tensor:
    """Mean cosine of each anchor with the other columns: column i is row i's positive.

    A part of `full_triplet`, for a loss of your own. It takes O((N + M) D), without any score.

    Formula and source: fastsim/losses/negatives.py.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (N,), differentiable; -inf where there is no other column.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> fastsim.mean_negative(torch.eye(2), torch.eye(2))
        tensor([0., 0.])
    """
    chosen = checked_backend(anchors, positives, "hard", backend)
    if chosen.name == "eager":
        return mean_negative_from_scores(dense_cosines(anchors, positives, chosen))
    unit_x, unit_y = units(anchors, positives, chosen)
    pairs = pairs_on_diagonal(None, anchors.shape[0], positives.shape[0], anchors.device)
    return terms_of_rows(unit_x, unit_y, torch.full_like(pairs.positives, -1), pairs, chosen)[1]


@embeddings_in_autocast("anchors", "positives")
def closest_negative(
    anchors: Tensor, positives: Tensor, *, mining: Mining = "semi-hard", backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The closest negative of each anchor: column i is row i's positive.

    A part of `full_triplet`, for a loss of your own. `top_k` finds the best of a whole corpus.

    Formula and source: fastsim/losses/negatives.py.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N.
        mining: "semi-hard", the largest cosine not above the positive's, or "hard", the largest.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (values (N,), indices (N,)), the values differentiable. A row with no such negative has
        value -inf and index -1; a row with a score that is not finite has value NaN and any index.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> fastsim.closest_negative(torch.eye(2), torch.eye(2))
        (tensor([0., 0.]), tensor([1, 0]))
    """
    chosen = checked_backend(anchors, positives, mining, backend)
    if chosen.name == "eager":
        return closest_negative_from_scores(
            dense_cosines(anchors, positives, chosen), mining=mining
        )
    unit_x, unit_y = units(anchors, positives, chosen)
    pairs = pairs_on_diagonal(None, anchors.shape[0], positives.shape[0], anchors.device)
    sides = selected_rows(anchors, unit_x, chosen), selected_rows(positives, unit_y, chosen)
    indices = closest_column(*sides, anchors.dtype, mining == "semi-hard", pairs, chosen)
    with without_autocast(unit_x.device.type):
        sums = torch.mv(unit_x.detach(), unit_y.detach().sum(0))
    return terms_of_rows(unit_x, unit_y, indices, pairs, chosen)[2] + 0 * sums, indices


# ---- the specification on a given score matrix ----


def mean_negative_from_scores(scores: Tensor, *, exclude: Exclude = None) -> Tensor:
    """The specification of `mean_negative`: scores (N, M) -> (N,)."""
    return mean_of(*negatives_of(scores, exclude))


def closest_negative_from_scores(
    scores: Tensor, *, mining: Mining = "semi-hard", exclude: Exclude = None
) -> tuple[Tensor, Tensor]:
    """The specification of `closest_negative`: scores (N, M) -> (values, indices), both (N,)."""
    check_choice("mining", mining, MININGS)
    values, indices = largest_of(*negatives_of(scores, exclude), mining)
    return values + 0 * as_float(scores).sum(1), indices


def negatives_of(scores, exclude):
    """The scores as floats and the (N, M) bool matrix of negatives."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    check_columns(scores)
    pairs = pairs_on_diagonal(exclude, rows, columns, scores.device)
    negative = pair_mask(pairs, rows, columns, scores.device)
    return as_float(scores), negative.scatter(1, pairs.positives[:, None], False)


def mean_of(scores, negative):
    count = negative.sum(1)
    mean = (scores * negative).sum(1) / count.clamp(min=1)
    return torch.where(count > 0, mean, -torch.inf)


def largest_of(scores, negative, mining):
    if mining == "semi-hard":
        held = scores.detach()
        limits = highest_equal(held.diagonal()[:, None], size_of_rows(held))
        negative = negative & (held <= limits)
    values, indices = scores.masked_fill(~negative, below_every_score(scores)).max(1)
    some = negative.any(1)
    return torch.where(some, values, -torch.inf), torch.where(some, indices, -1)


# ---- arguments ----


def pairs_on_diagonal(exclude, rows, columns, device):
    row_ids, column_ids = parse_exclude(exclude, rows, columns, device)
    return Pairs(torch.arange(rows, device=device), row_ids, column_ids)


def checked_backend(anchors, positives, mining, backend, *, exclude=None, margin=None, group=None):
    check_sides("positives", positives, "anchors", anchors, empty=group is not None)
    check_enough("positives", positives, "anchors", anchors)
    check_choice("mining", mining, MININGS)
    tensors = anchors, positives, exclude, margin
    return pick(backend, *tensors, kind="closest", group=group)

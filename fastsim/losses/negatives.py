"""The mean and the closest negative of each row: the terms of `full_triplet` as functions.

    mean_i = mean_{j != i} s_ij
    closest_i = max{s_ij : j != i, s_ij <= s_ii} (semi-hard), max{s_ij : j != i} (hard)

The mean is a product with the sum of all candidates, without a pass over N x M. The closest
negative needs one pass, only in the forward pass; its gradient goes to one candidate per row.

Source: see `full_triplet`, fastsim/losses/full_triplet.py.
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
    """Computes the mean cosine of each anchor with its negatives, all columns but its positive.

    Column i is the positive of row i. A term of `full_triplet`, as a building block for other
    losses. It takes O((N + M) D) time and computes no score matrix.

    Formula and source: fastsim/losses/negatives.py.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (N,), differentiable; -inf without a negative.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

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
    """Finds the closest negative of each anchor among all columns but its positive.

    Column i is the positive of row i. A term of `full_triplet`, as a building block for other
    losses. `top_k` searches a whole corpus.

    Formula and source: fastsim/losses/negatives.py.

    Args:
        anchors: (N, D).
        positives: (M, D), M >= N.
        mining: "semi-hard", the largest cosine that is not above that of the positive; or "hard",
            the largest of all.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (values (N,), indices (N,)); the values are differentiable. A row without such a negative
        has value -inf and index -1; a row with a non-finite score has value NaN and any index.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

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


# ---- the specifications ----


def mean_negative_from_scores(scores: Tensor, *, exclude: Exclude = None) -> Tensor:
    """The specification of `mean_negative` for scores (N, M): (N,)."""
    return mean_of(*negatives_of(scores, exclude))


def closest_negative_from_scores(
    scores: Tensor, *, mining: Mining = "semi-hard", exclude: Exclude = None
) -> tuple[Tensor, Tensor]:
    """The specification of `closest_negative` for scores (N, M): (values, indices), (N,) each."""
    check_choice("mining", mining, MININGS)
    values, indices = largest_of(*negatives_of(scores, exclude), mining)
    return values + 0 * as_float(scores).sum(1), indices


def negatives_of(scores, exclude):
    """(scores in the compute type, mask of the negatives), (N, M) each."""
    check_scores("scores", scores)
    rows, columns = scores.shape
    check_columns(scores)
    pairs = pairs_on_diagonal(exclude, rows, columns, scores.device)
    negative = pair_mask(pairs, rows, columns, scores.device)
    return as_float(scores), negative.scatter(1, pairs.positives[:, None], False)


def mean_of(scores, negative):
    """(N,) the mean score of each row's negatives, -inf without one."""
    count = negative.sum(1)
    mean = (scores * negative).sum(1) / count.clamp(min=1)
    return torch.where(count > 0, mean, -torch.inf)


def largest_of(scores, negative, mining):
    """(values, indices), (N,) each, of each row's closest negative; -inf and -1 without one."""
    if mining == "semi-hard":
        constant = scores.detach()
        limits = highest_equal(constant.diagonal()[:, None], size_of_rows(constant))
        negative = negative & (constant <= limits)
    values, indices = scores.masked_fill(~negative, below_every_score(scores)).max(1)
    with_negative = negative.any(1)
    values = torch.where(with_negative, values, -torch.inf)
    return values, torch.where(with_negative, indices, -1)


# ---- arguments ----


def pairs_on_diagonal(exclude, rows, columns, device):
    """The `Pairs` in which column i is the positive of row i."""
    row_ids, column_ids = parse_exclude(exclude, rows, columns, device)
    return Pairs(torch.arange(rows, device=device), row_ids, column_ids)


def checked_backend(anchors, positives, mining, backend, *, exclude=None, margin=None, group=None):
    """Checks the arguments and picks the backend."""
    check_sides("positives", positives, "anchors", anchors, empty=group is not None)
    check_enough("positives", positives, "anchors", anchors)
    check_choice("mining", mining, MININGS)
    tensors = anchors, positives, exclude, margin
    return pick(backend, *tensors, kind="closest", group=group)

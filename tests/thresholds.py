"""Whether inputs leave no doubt about which pairs or triplets count.

A pair whose score is the threshold but for rounding is in the loss of one dtype and not in that of
another: no error bound covers that. Nor does one cover a triplet at its margin, or two negatives of
which either may be the nearest.
"""

import torch

import fastsim
from tests.oracles import cosines, distances, scores

# Twice the largest difference of scores that count as equal (fastsim/ties.py), relative to the
# largest score if that is above 1, so that rounding leaves no doubt.
CLEAR = 16 * torch.finfo(torch.float32).eps
FEW = 28  # rows; of more, some triplet is always in doubt


def are_clear(loss, tensors, others, options):
    """loss, tensors, others, options: those of a case of `tests.cases`, as it makes them."""
    gaps = []
    if options.get("exclude_above") is not None:
        gaps.append(_gaps_of_scores(*tensors[:2], others, options))
    if options.get("guide") is not None:
        gaps.append(_gaps_of_guide(len(tensors[0]), others, options))
    if "distance" in options and len(tensors[0]) <= FEW:
        gaps.append(_gaps_of_distances(tensors[0], options))
    if loss is fastsim.full_triplet and len(tensors[1]) > 1:
        gaps.append(_gaps_of_full_triplets(*tensors, options))
    return all((gap.abs() > CLEAR).all() for gap in gaps)


def _positives(rows, others):
    return others[0] if others else torch.arange(rows)


def _gaps_of_scores(x, y, others, options):
    found = scores(x.double(), y.double(), options.get("similarity", "cosine"))
    own = found.gather(1, _positives(len(x), others)[:, None])
    return (found - own - options["exclude_above"]) / found.abs().max().clamp(min=1)


def _gaps_of_guide(rows, others, options):
    """Of each row and of its positive, with all rows of either side."""
    x, y = (side.double() for side in options["guide"])
    both, positives = torch.cat([x, y]), _positives(rows, others)
    of_rows, of_positives = cosines(x, both), cosines(y[positives], both)
    own = of_rows.gather(1, rows + positives[:, None])
    size = own.abs() if options.get("guide_strategy") == "relative" else 1
    limit = own - options.get("guide_margin", 0.0) * size
    return torch.cat([of_rows - limit, of_positives - limit])


def _gaps_of_distances(x, options):
    """Between two distances of a row, and between their difference and the margin."""
    found = distances(x.double(), options["distance"])
    between = found[:, :, None] - found[:, None, :]
    gaps = torch.cat([between, between - options.get("margin", 0.0)]).flatten()
    return _unequal(gaps / found.abs().max().clamp(min=1))


def _gaps_of_full_triplets(x, y, options):
    """Of each row: between its negatives and its positive, if that is a limit for them; between its
    two closest negatives; between the margin and how far the closest and their mean lie below.
    """
    found, margin = cosines(x.double(), y.double()), options.get("margin", 0.25)
    negative = ~torch.eye(*found.shape, dtype=torch.bool)
    if options.get("exclude") is not None:
        of_rows, of_columns = options["exclude"]
        negative &= of_rows[:, None] != of_columns
    gaps = found - found.diagonal()[:, None]
    semi_hard = options.get("mining", "semi-hard") == "semi-hard"
    near = gaps.where(negative & (gaps <= 0) if semi_hard else negative, -torch.inf)
    first, second = near.topk(2, dim=1).values.unbind(1)
    mean = gaps.where(negative, 0).sum(1) / negative.sum(1)
    close = gaps[negative] if semi_hard else gaps.new_empty(0)
    return _unequal(torch.cat([close, first - second, first + margin, mean + margin]))


def _unequal(gaps):
    """The gaps that are finite and not zero: equal numbers are equal in every dtype."""
    return gaps[gaps.isfinite() & (gaps.abs() > torch.finfo(torch.float64).eps ** 0.75)]

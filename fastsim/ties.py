"""Scores that count as equal, so that copies of a row get the same result at every place.

A matrix product sums in an order that may depend on the shapes and on the place in the matrix. So
the scores of copies of a row are equal only to rounding. Comparisons of scores allow a slack, which
puts all copies on the same side.
"""

import torch

SLACK = 8  # how much equal scores may differ, in units of eps times their size


def highest_equal(scores, size=1.0):
    """The highest scores that count as equal to the given ones.

    size: the size of the terms that a score sums, a number or a tensor; 1 for cosines.
    """
    return scores + SLACK * torch.finfo(scores.dtype).eps * size


def size_of_rows(scores):
    """The size (N, 1) of scores (N, M), also dot products: the largest |score|, at least 1."""
    low, high = scores.aminmax(dim=1, keepdim=True)
    return torch.maximum(high, -low).clamp(min=1)

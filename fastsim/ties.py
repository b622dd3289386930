"""Scores that count as equal: those of the copies of a row, wherever they stand.

A library adds up the products of two rows in an order that may depend on the shape of the matrices
and on the place within them, so the scores of copies are equal but for rounding. Where
scores are compared, a slack puts the copies of a row on the same side.
"""

import torch

SLACK = 8  # by what equal scores may differ, in spacings of numbers of their size


def highest_equal(scores, size=1.0):
    """The highest scores that count as equal to these.

    size: of the products that they are sums of, a number or a tensor; 1 of cosines.
    """
    return scores + SLACK * torch.finfo(scores.dtype).eps * size


def size_of_rows(scores):
    """(N, 1) the size of scores (N, M) that may be no cosines: the largest, at least 1."""
    low, high = scores.aminmax(dim=1, keepdim=True)
    return torch.maximum(high, -low).clamp(min=1)

"""Scores that count as equal: those of the copies of a row, wherever they stand.

A library adds up the products of two rows in an order that may depend on the shape of a product, so
scores of two products are equal but for rounding. In one product copies have the same score, but in
float64: there the last columns are added up in another order. Where it is asked whether a score is
above another, a slack brings copies to one side.
"""

import torch

SLACK = 8  # by what equal scores may differ, in spacings of numbers of their size


def highest_equal(scores, size=1.0, *, dtype=torch.float64):
    """The highest scores that count as equal to these.

    size: of the products that they are sums of, a number or a tensor; 1 of cosines.
    dtype: in which equal scores may differ. Of one product float64, which adds nothing to a
        float32; of another product their own.
    """
    return scores + SLACK * torch.finfo(dtype).eps * size


def size_of_rows(scores):
    """(N, 1) the size of scores (N, M) that may be no cosines: the largest, at least 1."""
    low, high = scores.aminmax(dim=1, keepdim=True)
    return torch.maximum(high, -low).clamp(min=1)

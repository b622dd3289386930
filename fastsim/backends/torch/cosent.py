"""CoSENT over a list of scores in plain torch: a sort and two scans, the same bits every time."""

import torch

from fastsim.backends import lists
from fastsim.precision import wide_dtype

LENGTH = 1024  # of a piece, which is scanned by itself
LARGEST = 300.0  # logits whose exponentials, and the products of two, double precision holds


def cosent(scores, labels, scale, want_score_grad):
    """`Backend.cosent`."""
    found = lists.cosent(running_sums, scores, labels, scale, want_score_grad)
    if scores.dtype != torch.float64:
        return found
    # Logarithms of sums as large as the logits have lost digits that double precision is to keep.
    size = (scores * scale).abs().amax()
    sums = _sums(scores, labels, scale)
    return tuple(
        logs if logs is None else torch.where(size <= LARGEST, exact, logs)
        for exact, logs in zip(sums, found, strict=True)
    )


def _sums(scores, labels, scale):
    """(loss (), dL/dscore (M,)) from the exponentials themselves: see `lists.cosent`."""
    order, begin, end = lists.runs(labels)
    logits = (scores * scale)[order]
    up, down = logits.exp(), (-logits).exp()
    none = logits.new_zeros(1)
    forward, backward = _scan(torch.stack([up, down.flip(0)]), torch.cumsum, torch.add)
    below = torch.cat([none, forward])[begin] * down
    above = torch.cat([backward.flip(0), none])[end] * up
    total = below.sum()
    score_grad = torch.empty_like(scores).scatter_(0, order, scale * (above - below) / (1 + total))
    return total.log1p(), score_grad


def running_sums(logits):
    """Running log-sum-exps (2, M) of logits (M,): forward, and of the negatives backward."""
    wide = logits.to(wide_dtype(logits.device))
    both = torch.stack([wide, (-wide).flip(0)])
    forward, backward = _scan(both, torch.logcumsumexp, torch.logaddexp)
    return torch.stack([forward, backward.flip(0)])


def _scan(values, accumulate, add):
    """`accumulate` along the rows of values (R, M), in pieces whose ends are scanned in turn.

    In one piece a GPU would add it up in an order that differs from run to run.
    """
    rows, count = values.shape
    pieces = -(-count // LENGTH)
    padded = values.new_zeros(rows, pieces * LENGTH)  # what follows the last value changes none
    padded[:, :count] = values
    scanned = accumulate(padded.view(rows, pieces, LENGTH), 2)
    if pieces > 1:
        before = _scan(scanned[:, :, -1], accumulate, add)[:, :-1, None]
        scanned = torch.cat([scanned[:, :1], add(scanned[:, 1:], before)], 1)
    return scanned.view(rows, -1)[:, :count]

"""CoSENT over a list of scores in plain torch: a sort and two scans, the same bits every time."""

import torch

from fastsim.backends import lists
from fastsim.precision import wide_dtype

LENGTH = 1024  # of a piece; each piece is scanned separately
LARGEST = 300.0  # logit up to which the product of two exponentials is in the range of float64


def cosent(scores, labels, scale, want_score_grad):
    """`Backend.cosent`."""
    from_logs = lists.cosent(running_sums, scores, labels, scale, want_score_grad)
    if scores.dtype != torch.float64:
        return from_logs
    # Logarithms as large as the logits have too few digits for float64.
    size = (scores * scale).abs().amax()
    from_sums = _from_sums(scores, labels, scale)
    return tuple(
        logs if logs is None else torch.where(size <= LARGEST, exact, logs)
        for exact, logs in zip(from_sums, from_logs, strict=True)
    )


def _from_sums(scores, labels, scale):
    """(loss (), dL/dscore (M,)) from sums of exponentials; the formulas are in `lists.cosent`."""
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
    """Running log-sum-exps (2, M): of logits (M,) forward, of their negatives backward."""
    wide = logits.to(wide_dtype(logits.device))
    both = torch.stack([wide, (-wide).flip(0)])
    forward, backward = _scan(both, torch.logcumsumexp, torch.logaddexp)
    return torch.stack([forward, backward.flip(0)])


def _scan(values, accumulate, add):
    """`accumulate` along the rows of values (R, M), in pieces.

    The last values of the pieces are scanned in the same way and added to the pieces behind. In
    one piece, a GPU would add in an order that differs from run to run.
    """
    rows, count = values.shape
    pieces = -(-count // LENGTH)
    padded = values.new_zeros(rows, pieces * LENGTH)  # zeros change no value before them
    padded[:, :count] = values
    scanned = accumulate(padded.view(rows, pieces, LENGTH), 2)
    if pieces > 1:
        before = _scan(scanned[:, :, -1], accumulate, add)[:, :-1, None]
        scanned = torch.cat([scanned[:, :1], add(scanned[:, 1:], before)], 1)
    return scanned.view(rows, -1)[:, :count]

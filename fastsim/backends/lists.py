"""Algorithms of GPU backends that sort: CoSENT by running sums, and `top_k` over many panels."""

import torch

from fastsim.precision import compute_dtype

STREAM = 1 << 24  # scores of a panel in `top_k`, whose sort keys take 8 bytes each


def cosent(scan, scores, labels, scale, want_score_grad):
    """(loss (), dL/dscore (M,) or None), by one sort of the labels and one scan from both ends.

    scan(logits (M,)) returns running log-sum-exps (2, M) in the type of sums: those of the logits
    from the start, and those of the negated logits from the end.

    t_a = lse_{labels_b < labels_a} z_b - z_a,  L = lse(0, t),
    dL/dz_a = e^{z_a + lse_{labels_b > labels_a}(-z_b) - L} - e^{t_a - L}.
    """
    count = scores.shape[0]
    order, begin, end = runs(labels)
    compute = compute_dtype(scores)
    logits = (scores.to(compute) * scale)[order]
    forward, backward = scan(logits)
    none = logits.new_full((1,), -torch.inf, dtype=forward.dtype)
    below = torch.cat([none, forward])[begin]
    above = torch.cat([backward, none])[end]
    logits = logits.to(forward.dtype)
    terms = below - logits
    # The 1 inside the logarithm, or NaN if any score is NaN or infinite.
    loss = torch.logsumexp(torch.cat([terms, (logits * 0).sum().reshape(1)]), 0)
    score_grad = None
    if want_score_grad:
        sorted_grad = scale * ((above + logits - loss).exp() - (terms - loss).exp())
        score_grad = scores.new_empty(count, dtype=compute)
        score_grad.scatter_(0, order, sorted_grad.to(compute))
    return loss.to(compute), score_grad


def runs(labels):
    """(order, begin, end), (M,) each: the sorted order of the labels, and for each place in it the
    first place and the end of the run of equal labels.

    Pairs of equal labels contribute nothing to the loss; only places before and after a run do.
    """
    if labels.dtype == torch.bool:
        labels = labels.view(torch.uint8)
    labels, order = labels.sort(stable=True)
    begin = torch.searchsorted(labels, labels)
    return order, begin, torch.searchsorted(labels, labels, right=True)


def top_k(backend, queries, corpus, k):
    """`Backend.top_k`; among equal cosines the first row of the corpus comes first."""
    unit_x, unit_y = backend.unit_rows(queries)[0], backend.unit_rows(corpus)[0]
    rows, columns = unit_x.shape[0], unit_y.shape[0]
    wide = min(columns, max(k, 1 << 14))
    tall = max(1, STREAM // wide)
    values = unit_x.new_empty((rows, k), dtype=torch.float32)
    indices = unit_x.new_empty((rows, k), dtype=torch.int64)
    for top in range(0, rows, tall):
        band = slice(top, min(rows, top + tall))
        best = indices.new_empty((band.stop - band.start, 0))
        for left in range(0, columns, wide):
            part = slice(left, min(columns, left + wide))
            scores = unit_x.new_empty(best.shape[0], part.stop - left, dtype=torch.float32)
            backend.multiply(unit_x[band], unit_y[part].t(), scores, accumulate=False)
            keys = torch.cat([best, _keys(scores, left)], 1)
            best = keys.topk(min(k, keys.shape[1]), dim=1).values
        values[band], indices[band] = _from_keys(best)
    return values, indices


def _keys(scores, left):
    """Int64 keys in the order of the scores, NaN the largest. Among equals the first column has the
    largest key. left: the index of the first column.
    """
    bits = torch.where(scores.isnan(), torch.nan, scores + 0.0).view(torch.int32)
    # As integers, negative floats are in reverse order.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    column = torch.arange(left, left + scores.shape[1], device=scores.device)
    return (ordered << 32) | (0xFFFFFFFF - column)


def _from_keys(keys):
    """(scores, columns) of the keys."""
    ordered = (keys >> 32).to(torch.int32)
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)

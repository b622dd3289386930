"""MaxSim in plain torch: one panel of token scores at a time, on any device."""

import torch

from fastsim.backends.bands import numbers_of_a_band
from fastsim.backends.rows import add_rows
from fastsim.backends.torch import panels
from fastsim.precision import compute_dtype
from fastsim.tokens import Tokens, chosen

GATHERED = 1 << 19  # numbers that the backward pass gathers at a time on a CPU


def max_sim(backend, x, y, cosine, own_documents, scores, places):
    """`Backend.max_sim`."""
    left, right = (_operand(backend, side.cleared(), cosine) for side in (x, y))
    values = x.rows.new_empty(x.rows.shape[0], scores.shape[1], dtype=scores.dtype)
    panels_of = _own_documents if own_documents else _all_documents
    for rows, documents, best, argmax in panels_of(x, y, left, right):
        values[rows, documents] = best
        if places is not None:
            places[documents, rows] = argmax.t().to(places.dtype)
    if x.mask is not None:
        values.masked_fill_(~x.mask[:, None], 0.0)
        if places is not None:
            places.masked_fill_(~x.mask, -1)
    scores.copy_(x.sums(values))


def _all_documents(x, y, left, right):
    """Yields (rows, documents, best, argmax) of each panel, if every query meets all documents.

    best, argmax: (R, K) for each query token and document, the score of the token that is chosen,
        and its place in the document.
    """
    workspace = panels.Workspace()
    for rows, columns, documents in _blocks(x, y):
        panel = workspace.panel(left[rows], right[columns])
        panels.multiply(left[rows], right[columns].t(), panel)
        mask = None if y.mask is None else y.mask[columns]
        count = documents.stop - documents.start
        block = Tokens(right[columns], count, y.length, y.offsets, mask)
        argmax = block.largest(panel)
        yield rows, documents, chosen(panel, argmax, block.starts()[:-1]), argmax


def _own_documents(x, y, left, right):
    """As `_all_documents`, if each query has documents of its own; a panel holds whole queries."""
    each, long = y.count // x.count, x.length
    wide = each * y.length
    workspace = panels.Workspace()
    queries = max(1, panels.panel_scores(left.device) // max(1, long * wide))
    for first in range(0, x.count, queries):
        last = min(x.count, first + queries)
        rows, columns = slice(first * long, last * long), slice(first * wide, last * wide)
        ours, theirs = (
            part.reshape(last - first, -1, part.shape[1]) for part in (left[rows], right[columns])
        )
        panel = workspace.panel(left[rows], right[:wide])
        panels.multiply_each(ours, theirs.mT, panel.view(-1, long, wide))
        panel = panel.view(-1, long, each, y.length)
        mask = None if y.mask is None else y.mask[columns].view(-1, 1, each, y.length)
        if mask is not None:
            panel.masked_fill_(~mask, -torch.inf)
        best, argmax = panel.max(3)
        if mask is not None:
            argmax.masked_fill_(~mask.any(3), -1)
        yield rows, slice(0, each), best.view(-1, each), argmax.view(-1, each)


def max_sim_backward(backend, grad, places, x, y, cosine, own_documents, needs_grad):
    """`Backend.max_sim_backward`."""
    rows_x, rows_y = x.cleared(), y.cleared()
    (left, inverse_x), (right, inverse_y) = (
        backend.unit_rows(rows, grad.dtype) if cosine else (rows.to(grad.dtype), None)
        for rows in (rows_x, rows_y)
    )
    sums = [
        torch.zeros_like(t) if want else None
        for t, want in zip((left, right), needs_grad, strict=True)
    ]
    numbers, starts = x.numbers(), y.starts()
    each, width = grad.shape[1], left.shape[1]
    every = torch.arange(each, device=grad.device)[:, None]
    for documents, rows in _pieces(each, left, numbers_of_a_band(left.device, GATHERED) // width):
        place, query, document = places[documents, rows].long(), numbers[rows], every[documents]
        first = starts[query * each + document] if own_documents else starts[document]
        columns = (first + place.clamp(min=0)).clamp(max=right.shape[0] - 1).flatten()
        factor = torch.where(place >= 0, grad[query, document], 0.0)[:, :, None]
        if sums[0] is not None:
            chosen_rows = right.index_select(0, columns).view(*place.shape, width)
            sums[0][rows] += chosen_rows.mul_(factor).sum(0)
        if sums[1] is not None:
            add_rows(sums[1], columns, (left[rows] * factor).view(-1, width))
    pairs = zip(sums, (rows_x, rows_y), (inverse_x, inverse_y), strict=True)
    return [_row_gradients(backend, *parts) for parts in pairs]


def _pieces(documents, rows, pairs):
    """Yields (documents, rows), both slices, with at most `pairs` pairs, but at least one."""
    tall = max(1, min(len(rows), pairs))
    wide = max(1, pairs // tall)
    for first in range(0, documents, wide):
        for top in range(0, len(rows), tall):
            yield slice(first, min(documents, first + wide)), slice(top, min(len(rows), top + tall))


def _row_gradients(backend, grad, rows, inverse):
    """The gradient of the rows of an input, from that of its operand; None stays None."""
    if grad is None or inverse is None:
        return grad if grad is None else grad.to(rows.dtype)
    one = inverse.new_ones(())
    return backend.unit_rows_backward(grad, rows, inverse, one, rows.dtype)[0]


def _operand(backend, rows, cosine):
    if cosine:
        return backend.unit_rows(rows)[0]
    half = rows.dtype.itemsize == 2 and panels.half_products(rows.device, rows.dtype)
    return rows if half else rows.to(compute_dtype(rows))


def _blocks(x, y):
    """Yields (rows, columns, documents), all slices, of each panel.

    If offsets on the device hold the lengths of the documents, each panel has all documents.
    """
    device, total = x.rows.device, x.rows.shape[0]
    wide = y.count
    if y.offsets is None:
        wide = min(y.count, max(1, panels.widest(device) // y.length))
    columns = y.rows.shape[0] if y.offsets is not None else wide * y.length
    tall = max(1, panels.panel_scores(device) // max(1, columns))
    for left in range(0, y.count, wide):
        documents = slice(left, min(y.count, left + wide))
        columns = slice(0, y.rows.shape[0])
        if y.offsets is None:
            columns = slice(documents.start * y.length, documents.stop * y.length)
        for top in range(0, total, tall):
            yield slice(top, min(total, top + tall)), columns, documents

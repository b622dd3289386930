"""MaxSim of queries and documents that are sets of tokens, as registered operators with a gradient.

    S_bk = sum_{q in query b} max_{d in document k} q . d

The forward pass keeps the token that each query token chose of each document; the backward pass
gathers and adds along these pairs, in one order. No tensor of all pairs of tokens is held.
"""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends import get
from fastsim.operators import define, differentiable_again
from fastsim.scores import compute_dtype, unit_formula
from fastsim.tokens import Tokens, chosen

SHORT = 1 << 15  # tokens of a document whose places fit 16 bits


def max_sim_scores(x, y, cosine, own, backend):
    """Scores (B, K) of the queries x and documents y (`Tokens`), of cosines or plain products.

    own: the documents are of one query each, K = documents / queries of each; else every query
    meets all, K = documents. A document without tokens has score -inf, a query without tokens 0.
    """
    if backend.name == "eager":
        return formula(x, y, cosine, own)
    rows = x.rows, y.rows
    if not torch.is_grad_enabled():  # nothing is kept for a gradient then
        rows = x.rows.detach(), y.rows.detach()
    sides = *rows, x.mask, y.mask, x.offsets, y.offsets
    return _MaxSim.apply(*sides, x.count, y.count, cosine, own, backend.name)


def formula(x, y, cosine, own):
    """The specification: every pair of tokens, the first of equals chosen."""
    rows, columns = (
        unit_formula(found) if cosine else found.to(compute_dtype(found))
        for found in (x.cleared(), y.cleared())
    )
    with without_autocast(rows.device.type):
        scores = rows @ columns.T
    numbers, starts = x.numbers(), y.starts()[:-1]
    if own:
        # The documents of the query that the token is of.
        each = y.count // x.count
        mine = numbers[:, None] * each + torch.arange(each, device=scores.device)
        starts = starts[mine]
    with torch.no_grad():
        places = y.largest(scores.detach())
        if own:
            places = places.gather(1, mine)
    values = chosen(scores, places, starts)
    if x.mask is not None:
        values = torch.where(x.mask[:, None], values, 0.0)
    return x.sums(values)


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, *rest):
        options = rest[4:]
        wants = any(ctx.needs_input_grad[:2])
        scores, places = _max_sim(x, y, *rest[:4], *options[:4], wants, options[4])
        ctx.save_for_backward(x, y, places, *rest[:4])
        ctx.options = options
        return scores

    @staticmethod
    @differentiable_again(
        lambda ctx, saved, x, y: formula(
            *_sides(x, y, *saved[3:], *ctx.options[:2]), *ctx.options[2:4]
        ),
        inputs=2,
    )
    def backward(ctx, saved, grad):
        x, y, places, *rest = saved
        wants = list(ctx.needs_input_grad[:2])
        grads = _max_sim_backward(
            grad.contiguous(), places, x, y, *rest, *ctx.options[:4], wants, ctx.options[4]
        )
        grads = (g if wanted else None for g, wanted in zip(grads, wants, strict=True))
        return *grads, *(None,) * 9


# ---- the registered operators; a gradient that is not wanted is empty, as are places ----


def _sides(x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents):
    def side(rows, mask, offsets, count):
        length = rows.shape[0] // count if offsets is None else None
        return Tokens(rows, count, length, offsets, mask)

    return side(x, x_mask, x_offsets, queries), side(y, y_mask, y_offsets, documents)


def _forward(
    x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents, cosine, own, wants, backend
):
    sides = _sides(x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents)
    scores, places = _outputs(*sides, own, wants)
    with without_autocast(x.device.type):
        get(backend).max_sim(*sides, cosine, own, scores, places if wants else None)
    return scores, places


def _outputs(x, y, own, wants):
    """(scores (B, K), places (K, P)), not written."""
    each = y.count // x.count if own else y.count
    short = y.offsets is None and y.length <= SHORT
    shape = (each, x.rows.shape[0]) if wants else (0, 0)
    places = x.rows.new_empty(shape, dtype=torch.int16 if short else torch.int32)
    return x.rows.new_empty(x.count, each, dtype=compute_dtype(x.rows)), places


def _fake(
    x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents, cosine, own, wants, backend
):
    sides = _sides(x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents)
    return _outputs(*sides, own, wants)


def _backward(
    grad,
    places,
    x,
    y,
    x_mask,
    y_mask,
    x_offsets,
    y_offsets,
    queries,
    documents,
    cosine,
    own,
    wants,
    backend,
):
    sides = _sides(x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents)
    with without_autocast(x.device.type):
        grads = get(backend).max_sim_backward(grad, places, *sides, cosine, own, wants)
    return tuple(x.new_empty(0) if found is None else found for found in grads)


def _backward_fake(
    grad,
    places,
    x,
    y,
    x_mask,
    y_mask,
    x_offsets,
    y_offsets,
    queries,
    documents,
    cosine,
    own,
    wants,
    backend,
):
    return tuple(
        t.new_empty(t.shape if wanted else 0) for t, wanted in zip((x, y), wants, strict=True)
    )


_max_sim = define(
    "max_sim",
    "(Tensor x, Tensor y, Tensor? x_mask, Tensor? y_mask, Tensor? x_offsets, Tensor? y_offsets,"
    " SymInt queries, SymInt documents, bool cosine, bool own, bool wants, str backend)"
    " -> (Tensor, Tensor)",
    _forward,
    _fake,
)
_max_sim_backward = define(
    "max_sim_backward",
    "(Tensor grad, Tensor places, Tensor x, Tensor y, Tensor? x_mask, Tensor? y_mask,"
    " Tensor? x_offsets, Tensor? y_offsets, SymInt queries, SymInt documents, bool cosine,"
    " bool own, bool[] wants, str backend)"
    " -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)

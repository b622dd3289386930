"""MaxSim of queries and documents that are sets of tokens, as registered operators with a gradient.

    S_bk = sum_{q in query b} max_{d in document k} q . d

The forward pass keeps, for each query token and document, the token with the maximum. The backward
pass gathers and adds along these pairs, in a fixed order. No tensor of all pairs of tokens exists.
"""

import torch

from fastsim.autocast import without_autocast
from fastsim.backends import get
from fastsim.operators import define, differentiable_again
from fastsim.precision import compute_dtype
from fastsim.scores import unit_formula
from fastsim.tokens import Tokens, chosen

SHORT = 1 << 15  # up to this many tokens of a document, places fit into 16 bits


def max_sim_scores(x, y, cosine, own_documents, backend):
    """The scores (B, K) of queries x and documents y (`Tokens`), from cosines or dot products.

    own_documents: whether each query has documents of its own and is compared with these alone; K
        is then their number for one query. Otherwise every query meets all K documents.

    The score of a document without tokens is -inf, that of a query without tokens 0.
    """
    if backend.name == "eager":
        return formula(x, y, cosine, own_documents)
    rows = x.rows, y.rows
    if not torch.is_grad_enabled():  # so that nothing is kept for a gradient
        rows = x.rows.detach(), y.rows.detach()
    sides = *rows, x.mask, y.mask, x.offsets, y.offsets
    return _MaxSim.apply(*sides, x.count, y.count, cosine, own_documents, backend.name)


def formula(x, y, cosine, own_documents):
    """The specification: all pairs of tokens at once; the first of equal maxima counts."""
    rows, columns = (
        unit_formula(tokens) if cosine else tokens.to(compute_dtype(tokens))
        for tokens in (x.cleared(), y.cleared())
    )
    with without_autocast(rows.device.type):
        scores = rows @ columns.T
    numbers, starts = x.numbers(), y.starts()[:-1]
    if own_documents:
        each = y.count // x.count  # documents of a query
        documents = numbers[:, None] * each + torch.arange(each, device=scores.device)
        starts = starts[documents]
    with torch.no_grad():
        places = y.largest(scores.detach())
        if own_documents:
            places = places.gather(1, documents)
    values = chosen(scores, places, starts)
    if x.mask is not None:
        values = torch.where(x.mask[:, None], values, 0.0)
    return x.sums(values)


class _MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, *rest):
        options = rest[4:]
        needs_grad = any(ctx.needs_input_grad[:2])
        scores, places = _max_sim(x, y, *rest[:4], *options[:4], needs_grad, options[4])
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
        needs_grad = list(ctx.needs_input_grad[:2])
        grads = _max_sim_backward(
            grad.contiguous(), places, x, y, *rest, *ctx.options[:4], needs_grad, ctx.options[4]
        )
        grads = (g if wanted else None for g, wanted in zip(grads, needs_grad, strict=True))
        return *grads, *(None,) * 9


# ---- the registered operators; gradients and places that are not needed are empty ----


def _sides(x, y, x_mask, y_mask, x_offsets, y_offsets, queries, documents):
    def side(rows, mask, offsets, count):
        length = rows.shape[0] // count if offsets is None else None
        return Tokens(rows, count, length, offsets, mask)

    return side(x, x_mask, x_offsets, queries), side(y, y_mask, y_offsets, documents)


def _forward(*arguments):
    *inputs, cosine, own_documents, needs_grad, backend = arguments
    x, y = _sides(*inputs)
    scores, places = _outputs(x, y, own_documents, needs_grad)
    with without_autocast(scores.device.type):
        get(backend).max_sim(x, y, cosine, own_documents, scores, places if needs_grad else None)
    return scores, places


def _outputs(x, y, own_documents, needs_grad):
    """Memory for (scores (B, K), places (K, P)); the places are empty without a gradient."""
    each = y.count // x.count if own_documents else y.count
    short = y.offsets is None and y.length <= SHORT
    shape = (each, x.rows.shape[0]) if needs_grad else (0, 0)
    places = x.rows.new_empty(shape, dtype=torch.int16 if short else torch.int32)
    return x.rows.new_empty(x.count, each, dtype=compute_dtype(x.rows)), places


def _fake(*arguments):
    *inputs, _, own_documents, needs_grad, _ = arguments
    return _outputs(*_sides(*inputs), own_documents, needs_grad)


def _backward(grad, places, *arguments):
    *inputs, cosine, own_documents, needs_grad, backend = arguments
    with without_autocast(grad.device.type):
        grads = get(backend).max_sim_backward(
            grad, places, *_sides(*inputs), cosine, own_documents, needs_grad
        )
    return tuple(inputs[0].new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(grad, places, *arguments):
    x, y, *_, needs_grad, _ = arguments
    sides = zip((x, y), needs_grad, strict=True)
    return tuple(side.new_empty(side.shape if need else 0) for side, need in sides)


_max_sim = define(
    "max_sim",
    "(Tensor x, Tensor y, Tensor? x_mask, Tensor? y_mask, Tensor? x_offsets, Tensor? y_offsets,"
    " SymInt queries, SymInt documents, bool cosine, bool own_documents, bool needs_grad,"
    " str backend)"
    " -> (Tensor, Tensor)",
    _forward,
    _fake,
)
_max_sim_backward = define(
    "max_sim_backward",
    "(Tensor grad, Tensor places, Tensor x, Tensor y, Tensor? x_mask, Tensor? y_mask,"
    " Tensor? x_offsets, Tensor? y_offsets, SymInt queries, SymInt documents, bool cosine,"
    " bool own_documents, bool[] needs_grad, str backend)"
    " -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)

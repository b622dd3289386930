"""InfoNCE in one call: with a guide, a bias, further candidates, label smoothing.

With a guide the call computes its cosines of all pairs next to the scores. With further candidates
or label smoothing it computes one softmax over the scores of all parts (further_candidates.py) side
by side; on a GPU the torch backend uses the specification for it. A loss that one call cannot
compute takes one log-sum-exp of the engine per part. For a small batch the calls between these take
longer than the work itself, and a large batch computes the scores of each part twice.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.batch_metrics import empty_totals, in_metrics, record_totals
from fastsim.checks import check_bias_numbers, check_constant
from fastsim.distributed import join
from fastsim.engine.gradients import times_loss_gradient
from fastsim.engine.one_call import panels_alone
from fastsim.engine.one_call_loss import OneCallLoss
from fastsim.losses.further_candidates import DIRECTIONS, Further, dense, own_scores, parts_of
from fastsim.operators import differentiable_again, traced
from fastsim.pairs import Guide, Pairs, as_bias, parse_bias
from fastsim.records import replaced
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss


def info_nce_in_one_call(
    anchors,
    candidates,
    further,
    guide,
    bias,
    *,
    scale,
    label_smoothing,
    similarity,
    reduction,
    backend,
    options,
    formula,
):
    """(function, tensors), so that function(*tensors) is the loss; None if one call cannot do it.

    tensors: anchors (N, D) and candidates (M, D); then the bias (M,) and the two tensors of the
        guide, or own negatives (N, K, D) and references (R, D), each only if present.
    formula: the specification of the loss. options: its options.
    """
    with_further = further.present or bool(label_smoothing)
    paired = guide is not None or bias is not None
    if with_further == paired:
        return None
    batch = join(None, "info_nce", anchors, candidates)
    weight = batch.row_weights(reduction, anchors)
    if paired:
        tensors = anchors, candidates, *(() if bias is None else (bias,)), *(guide or ())
        if bias is not None:
            bias = parse_bias(bias, len(candidates), anchors)
        tile = _paired_tile(anchors, guide, bias, similarity, options)
        one_call = OneCallLoss(tile, scale, 0.0, weight, None, backend, for_metrics=True)
        loss = PairedLoss(one_call, options, formula)
    else:
        loss = FurtherLoss(
            directions=further.directions,
            has_own=further.own_negatives is not None,
            has_references=further.references is not None,
            numbers=(scale, float(options["margin"]), float(label_smoothing)),
            similarity=similarity,
            weight=weight,
            batch=batch,
            backend=backend,
            formula=partial(formula, **options, reduction=reduction),
        )
        sides = anchors, candidates, further.own_negatives, further.references
        tensors = [side for side in sides if side is not None]
        # The formula records no metrics. All conditions are part of a signature
        # (engine/prepared.py).
        size = loss.scores(*tensors)
        by_formula = backend.leaves_further(*size, anchors.device) and not in_metrics()
        loss = loss._replace(by_formula=by_formula)
    return (loss, tensors) if loss.serves(*tensors) else None


def _paired_tile(anchors, guide, bias, similarity, options):
    """The `TileLoss` with empty tensors in the places of the guide and the bias."""
    if guide is not None:
        relative = options["guide_strategy"] == "relative"
        placeholders = [side.new_empty(0) for side in guide]
        guide = Guide(*placeholders, None, float(options["guide_margin"]), relative)
    bias = None if bias is None else bias.new_empty(0)
    return TileLoss(
        "softmax",
        Pairs(_places(anchors), column_bias=bias, guide=guide),
        margin=float(options["margin"]),
        symmetric=options["symmetric"],
        cosine=similarity == "cosine",
    )


def _places(anchors):
    """(N,) the column of each positive: column i for row i."""
    return torch.arange(anchors.shape[0], device=anchors.device)


class PairedLoss(NamedTuple):
    """The loss as a function of anchors and candidates, and a bias, a guide or both.

    one_call: the loss with empty tensors in the places of bias and guide.
    formula: the specification of `info_nce`. options: its options.
    """

    one_call: OneCallLoss
    options: dict
    formula: Callable

    def serves(self, anchors, candidates, *_):
        """Whether one call can compute the loss for these sizes and settings."""
        return self.one_call.serves(anchors, None if candidates is anchors else candidates)

    def __call__(self, anchors, candidates, *tensors):
        one_call, tile = self.one_call, self.one_call.tile
        bias, guide, sides = tile.pairs.column_bias, tile.pairs.guide, None
        if bias is not None:
            check_constant("candidate_bias", tensors[0])
            bias = as_bias(tensors[0], anchors)
            if not one_call.backend.checks_bias:
                check_bias_numbers("candidate_bias", bias)
        if guide is not None:
            sides = tuple(side.detach() for side in tensors[-2:])
            guide = replaced(guide, rows=sides[0], columns=sides[1])

        def losses(scores, scale, _):
            options = self.options | {"temperature": 1 / scale, "reduction": "none"}
            options |= {"candidate_bias": bias, "guide": sides}
            return self.formula(scores, tile.pairs.positives, **options)

        pairs = replaced(tile.pairs, column_bias=bias, guide=guide)
        one_call = one_call._replace(tile=replaced(tile, pairs=pairs), formula=losses)
        try:
            return one_call(anchors, candidates)
        except RuntimeError:
            if bias is not None:
                check_bias_numbers("candidate_bias", bias)  # its message names the number
            raise


class FurtherLoss(NamedTuple):
    """The loss as a function of anchors and candidates, and own negatives and references if any.

    numbers: scale, margin, label smoothing.
    weight: the weight of each row's loss in the reduction; None for "none".
    formula: (scores (N, M), more=(N, R) logits) -> the loss in plain torch.
    by_formula: whether to use the formula instead of the backend.
    """

    directions: tuple
    has_own: bool
    has_references: bool
    numbers: tuple
    similarity: str
    weight: float | None
    batch: object
    backend: Backend
    formula: object
    by_formula: bool = False

    def sides(self, anchors, candidates, *more):
        """(anchors, candidates, own negatives or None, references or None)."""
        own = more[0] if self.has_own else None
        return anchors, candidates, own, more[-1].detach() if self.has_references else None

    def serves(self, *tensors):
        """Whether one call, or the formula, can compute the loss for these sizes and settings."""
        if traced() or panels_alone():
            return False
        anchors = tensors[0]
        sizes = *self.scores(*tensors), anchors.shape[1], anchors.dtype
        return self.by_formula or self.backend.serves_further(*sizes, self.flags())

    def scores(self, *tensors):
        """(rows, columns), the size of the score matrix of all parts side by side."""
        anchors, candidates, own, references = self.sides(*tensors)
        rows, columns = len(anchors), len(candidates)
        widths = {"query_to_query": rows, "doc_to_query": rows, "doc_to_doc": columns}
        columns += sum(widths.get(direction, 0) for direction in self.directions)
        columns += 0 if own is None else own.shape[1]
        return rows, columns + (0 if references is None else len(references))

    def flags(self):
        """For each direction but the first, whether it is among those of the loss."""
        return [name in self.directions for name in DIRECTIONS[1:]]

    def __call__(self, *tensors):
        sides = self.sides(*tensors)
        if self.by_formula:
            return self.in_plain_torch(*sides)
        if torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in sides[:3]):
            return _Further.apply(*sides, self)
        return self.value(sides, self.weight, (False,) * 3)[0]

    def value(self, sides, weights, needs_grad, *, for_metrics=True):
        """`Backend.further` for the sides; for_metrics: whether `fastsim.metrics` records it."""
        totals = empty_totals(sides[0].device) if for_metrics and in_metrics() else None
        cosine = self.similarity == "cosine"
        options = self.numbers, cosine, weights, needs_grad, totals
        loss_and_grads = self.backend.further(sides, self.flags(), *options)
        if totals is not None:
            record_totals(totals)
        return loss_and_grads

    def in_plain_torch(self, anchors, candidates, own, references):
        """The loss from its specification."""
        eager, scale = get("eager"), self.numbers[0]
        further, places = Further(self.directions, own, references), _places(anchors)
        scores = dense_scores(anchors, candidates, eager, self.similarity)
        parts = parts_of(further, anchors, candidates, places, Pairs(places), None, self.batch)
        more = dense(parts, 1 / scale, self.similarity, eager)
        if own is not None:
            more.append(scale * own_scores(further, anchors, eager, self.similarity))
        return self.formula(scores, more=torch.cat(more, 1) if more else None)


class _Further(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchors, candidates, own, references, further):
        sides, ctx.further = (anchors, candidates, own, references), further
        # For reduction "none" the weights are dL/dlosses, which only the backward pass knows.
        needs_grad = ctx.needs_input_grad[:3] if further.weight is not None else (False,) * 3
        loss, grads = further.value(sides, further.weight, needs_grad)
        ctx.save_for_backward(*sides, *grads)
        return loss

    @staticmethod
    @differentiable_again(
        lambda ctx, saved, *sides: ctx.further.in_plain_torch(*sides, saved[3]), inputs=3
    )
    def backward(ctx, saved, grad):
        sides, grads = saved[:4], saved[4:]
        needs_grad = ctx.needs_input_grad[:3]
        if ctx.further.weight is None:
            weights = grad.contiguous()
            grads = ctx.further.value(sides, weights, needs_grad, for_metrics=False)[1]
        else:
            grads = times_loss_gradient(grads, grad, needs_grad)
        pairs = zip(grads, sides, strict=False)
        return (
            *(one if one is None else one.to(side.dtype) for one, side in pairs),
            None,
            None,
        )

"""InfoNCE with further candidates or label smoothing, in one call of the backend.

The call computes one softmax over the scores of all parts (further_candidates.py) side by side; on
a GPU the torch backend uses the specification for it. Otherwise the loss takes one log-sum-exp of
the engine for each part (batch_info_nce.py). For a small batch the calls between these take longer
than the work itself, and a large batch computes the scores of each part twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.batch_metrics import empty_totals, in_metrics, record_totals
from fastsim.engine.gradients import as_scalar, times_loss_gradient
from fastsim.engine.later_calls import scale_of
from fastsim.engine.one_call import panels_alone
from fastsim.losses.call_tensors import explain, with_tensors
from fastsim.losses.further_candidates import (
    DIRECTIONS,
    Further,
    admitted_own_scores,
    dense,
    parts_of,
)
from fastsim.operators import differentiable_again, traced
from fastsim.pairs import Pairs
from fastsim.precision import compute_dtype
from fastsim.reduce import over_temperature
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss


class FurtherLoss(NamedTuple):
    """The loss as a function of anchors (N, D), candidates (M, D) and the tensors in `names`.

    tile: the softmax over the candidates, with empty tensors in the places of those in `names`.
    names: of the tensors that follow the candidates: "temperature", "positives", "row_ids",
        "column_ids", "candidate_bias", "own_negatives", "references", "guide_rows",
        "guide_columns".
    temperature: a number; None if it is among the tensors.
    directions: those of the loss.
    weight: the weight of each row's loss in the reduction; None for "none".
    formula: the specification of `info_nce`. options: its options, with the reduction.
    by_formula: whether to use the formula instead of the backend.
    """

    tile: TileLoss
    names: tuple
    temperature: float | None
    directions: tuple
    weight: float | None
    batch: object
    backend: Backend
    formula: Callable
    options: dict
    by_formula: bool = False

    def serves(self, anchors, candidates, *tensors):
        """Whether one call, or the formula, can compute the loss for these sizes and settings."""
        if traced() or panels_alone():
            return False
        sizes = *self.scores(anchors, candidates, *tensors), anchors.shape[1], anchors.dtype
        return self.by_formula or self.backend.serves_further(*sizes, self.flags())

    def formula_is_faster(self, anchors, candidates, *tensors):
        """Whether the formula is faster than a pass for each part. It records no metrics."""
        # All that this depends on is part of a signature (engine/prepared.py).
        size = self.scores(anchors, candidates, *tensors)
        return self.backend.leaves_further(*size, anchors.device) and not in_metrics()

    def scores(self, anchors, candidates, *tensors):
        """(rows, columns), the size of the score matrix of all parts side by side."""
        given = dict(zip(self.names, tensors, strict=True))
        rows, columns = len(anchors), len(candidates)
        widths = {"query_to_query": rows, "doc_to_query": rows, "doc_to_doc": columns}
        columns += sum(widths.get(direction, 0) for direction in self.directions)
        columns += given["own_negatives"].shape[1] if "own_negatives" in given else 0
        return rows, columns + len(given.get("references", ()))

    def flags(self):
        """For each direction but the first, whether it is among those of the loss."""
        return [name in self.directions for name in DIRECTIONS[1:]]

    def __call__(self, anchors, candidates, *tensors):
        given = dict(zip(self.names, tensors, strict=True))
        own, references = given.get("own_negatives"), given.get("references")
        references = None if references is None else references.detach()
        tile = with_tensors(self.tile, anchors, candidates, self.backend, given)
        scale = scale_of(given.get("temperature", self.temperature), anchors)
        if isinstance(scale, torch.Tensor):
            scale = as_scalar(scale, compute_dtype(anchors), anchors.device)
        further = self._replace(tile=tile)
        sides = anchors, candidates, own, scale
        if self.by_formula:
            return further.in_plain_torch(*sides, references)
        wanted = any(isinstance(side, torch.Tensor) and side.requires_grad for side in sides)
        try:
            if torch.is_grad_enabled() and wanted:
                return _Further.apply(*sides, references, further)
            return further.value(*sides, references, self.weight, (False,) * 4)[0]
        except RuntimeError:
            explain(tile)
            raise

    def value(
        self, anchors, candidates, own, scale, references, weights, needs_grad, *, for_metrics=True
    ):
        """`Backend.further` for the sides; for_metrics: whether `fastsim.metrics` records it."""
        totals = empty_totals(anchors.device) if for_metrics and in_metrics() else None
        sides = anchors, candidates, own, references
        options = self.flags(), scale, weights, needs_grad, totals
        loss_and_grads = self.backend.further(self.tile, sides, *options)
        if totals is not None:
            record_totals(totals)
        return loss_and_grads

    def in_plain_torch(self, anchors, candidates, own, scale, references):
        """The loss from its specification."""
        eager, pairs, temperature = get("eager"), self.tile.pairs, 1 / scale
        similarity = "cosine" if self.tile.cosine else "dot"
        further = Further(self.directions, own, references)
        alone = Pairs(pairs.positives)  # parts beside these have no directions, so only references
        parts = parts_of(further, anchors, candidates, alone.positives, alone, None, self.batch)
        more = dense(parts, temperature, similarity, eager)
        if own is not None:
            sides = anchors, candidates, pairs.positives, pairs.exclude_above
            scores = admitted_own_scores(further, *sides, eager, similarity)
            more.append(over_temperature(scores, temperature))
        exclude = None if pairs.row_ids is None else (pairs.row_ids, pairs.column_ids)
        tensors = {
            "temperature": temperature,
            "exclude": exclude,
            "guide": pairs.guide and (pairs.guide.rows, pairs.guide.columns),
            "candidate_bias": pairs.column_bias,
            "more": torch.cat(more, 1) if more else None,
        }
        scores = dense_scores(anchors, candidates, eager, similarity)
        return self.formula(scores, pairs.positives, **self.options | tensors)


class _Further(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchors, candidates, own, scale, references, further):
        sides, ctx.further = (anchors, candidates, own, scale, references), further
        # For reduction "none" the weights are dL/dlosses, which only the backward pass knows.
        needs_grad = ctx.needs_input_grad[:4] if further.weight is not None else (False,) * 4
        loss, grads = further.value(*sides, further.weight, needs_grad)
        ctx.number = None if isinstance(scale, torch.Tensor) else scale
        ctx.save_for_backward(*(None if side is ctx.number else side for side in sides), *grads)
        return loss

    @staticmethod
    @differentiable_again(lambda ctx, saved, *sides: _again(ctx, sides, saved[4]), inputs=4)
    def backward(ctx, saved, grad):
        *sides, scale, references = saved[:5]
        grads, needs_grad = saved[5:], ctx.needs_input_grad[:4]
        if ctx.further.weight is None:
            given = *sides, ctx.number if scale is None else scale, references
            weights = grad.contiguous()
            grads = ctx.further.value(*given, weights, needs_grad, for_metrics=False)[1]
        else:
            grads = times_loss_gradient(grads, grad, needs_grad)
        *of_sides, of_scale = (
            one if need else None for one, need in zip(grads, needs_grad, strict=True)
        )
        return (
            *(
                one if one is None else one.to(side.dtype)
                for one, side in zip(of_sides, sides, strict=True)
            ),
            None if of_scale is None else of_scale[0].to(scale.dtype),
            None,
            None,
        )


def _again(ctx, sides, references):
    """The formula of a `_Further`. sides: anchors, candidates, own negatives and scale."""
    anchors, candidates, own, scale = sides
    scale = ctx.number if scale is None else scale
    return ctx.further.in_plain_torch(anchors, candidates, own, scale, references)

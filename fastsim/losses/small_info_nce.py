"""InfoNCE of a small batch with a guide, a bias, further candidates or label smoothing: one call.

A guide's cosines of all pairs are made beside the scores. Further candidates, or label smoothing:
one softmax over the scores of all parts (further_candidates.py), which lie side by side. On a GPU
the torch backend leaves that to the specification. Of a large batch each part is a log-sum-exp of
the engine, and what lies between these takes longer than a small batch's scores.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.batch_metrics import no_totals, record_totals, watched
from fastsim.checks import check_bias_numbers, check_constant
from fastsim.distributed import join
from fastsim.engine.one_call import panels_alone
from fastsim.engine.whole_loss import WholeLoss
from fastsim.losses.further_candidates import DIRECTIONS, Further, dense, own_scores, parts_of
from fastsim.operators import differentiable_again, traced
from fastsim.pairs import Guide, Pairs, as_bias, parse_bias
from fastsim.records import replaced
from fastsim.scores import dense_scores
from fastsim.tile import Tile


def small_info_nce(
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
    """(function, tensors) where the loss is function(*tensors); None where one call cannot make it.

    tensors: anchors (N, D), candidates (M, D), then the bias (M,) and those of the guide, or
    own negatives (N, K, D) and references (R, D) where `further` has them. options: the loss's own,
    as `formula` takes them, its specification.
    """
    plain = not (further.given or label_smoothing)
    paired = guide is not None or bias is not None
    if plain != paired:
        return None
    batch = join(None, "info_nce", anchors, candidates)
    weight = batch.row_weights(reduction, anchors)
    if plain:
        tensors = anchors, candidates, *(() if bias is None else (bias,)), *(guide or ())
        if bias is not None:
            bias = parse_bias(bias, len(candidates), anchors).new_empty(0)
        if guide is not None:
            relative = options["guide_strategy"] == "relative"
            nothing = [side.new_empty(0) for side in guide]
            guide = Guide(*nothing, None, float(options["guide_margin"]), relative)
        tile = Tile(
            "softmax",
            Pairs(_places(anchors), column_bias=bias, guide=guide),
            margin=float(options["margin"]),
            symmetric=options["symmetric"],
            cosine=similarity == "cosine",
        )
        whole = WholeLoss(tile, scale, 0.0, weight, None, backend, measured=True)
        small = PairedLoss(whole, options, formula)
        return (small, tensors) if small.serves(*tensors) else None
    rest = options | {"reduction": reduction}
    numbers = scale, float(options["margin"]), float(label_smoothing)
    own, references = further.own_negatives, further.references
    small = FurtherLoss(
        further.directions,
        own is not None,
        references is not None,
        numbers,
        similarity,
        weight,
        batch,
        backend,
        partial(formula, **rest),
    )
    sides = [side for side in (anchors, candidates, own, references) if side is not None]
    # The formula has no metrics. What it depends on is part of a signature (engine/prepared.py).
    left = backend.leaves_further(*small.scores(*sides), anchors.device) and not watched()
    small = small._replace(by_formula=left)
    return (small, sides) if small.serves(*sides) else None


def _places(anchors):
    """(N,) the columns of the positives, a row's own."""
    return torch.arange(anchors.shape[0], device=anchors.device)


class PairedLoss(NamedTuple):
    """The loss where tensors beside the rows have a say: a bias, then those of a guide.

    whole: the loss with nothing in their places. formula: the specification, as of `info_nce`.
    """

    whole: WholeLoss
    options: dict
    formula: Callable

    def serves(self, anchors, candidates, *_):
        """Whether one call makes it, where sizes and settings are these."""
        return self.whole.serves(anchors, None if candidates is anchors else candidates)

    def __call__(self, anchors, candidates, *tensors):
        whole, tile = self.whole, self.whole.tile
        bias, guide, sides = tile.pairs.column_bias, tile.pairs.guide, None
        if bias is not None:
            check_constant("candidate_bias", tensors[0])
            bias = as_bias(tensors[0], anchors)
            if not whole.backend.checks_bias:
                check_bias_numbers("candidate_bias", bias)
        if guide is not None:
            sides = tuple(side.detach() for side in tensors[-2:])
            guide = replaced(guide, rows=sides[0], columns=sides[1])

        def losses(scores, scale, _):
            given = self.options | {"temperature": 1 / scale, "reduction": "none"}
            given |= {"candidate_bias": bias, "guide": sides}
            return self.formula(scores, tile.pairs.positives, **given)

        pairs = replaced(tile.pairs, column_bias=bias, guide=guide)
        whole = whole._replace(tile=replaced(tile, pairs=pairs), formula=losses)
        try:
            return whole(anchors, candidates)
        except RuntimeError:
            if bias is not None:
                check_bias_numbers("candidate_bias", bias)  # which says the number
            raise


class FurtherLoss(NamedTuple):
    """The loss of anchors and candidates, own negatives and references where it has them.

    numbers: scale, margin, label smoothing. weight: that of every row's loss, or None. formula:
    (scores (N, M), more=(N, R) logits) -> the loss in plain torch; by_formula: it makes the loss.
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
        """Whether one call or the formula makes it, where sizes and settings are these."""
        if traced() or panels_alone():
            return False
        anchors = tensors[0]
        sizes = *self.scores(*tensors), anchors.shape[1], anchors.dtype
        return self.by_formula or self.backend.serves_further(*sizes)

    def scores(self, *tensors):
        """(rows, columns) of those of all parts."""
        anchors, candidates, own, references = self.sides(*tensors)
        rows, columns = len(anchors), len(candidates)
        widths = {"query_to_query": rows, "doc_to_query": rows, "doc_to_doc": columns}
        columns += sum(widths.get(direction, 0) for direction in self.directions)
        columns += 0 if own is None else own.shape[1]
        return rows, columns + (0 if references is None else len(references))

    def __call__(self, *tensors):
        sides = self.sides(*tensors)
        if self.by_formula:
            return self.in_plain_torch(*sides)
        if torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in sides[:3]):
            return _Further.apply(*sides, self)
        return self.value(sides, self.weight, (False,) * 3)[0]

    def value(self, sides, weights, wants, *, measured=True):
        """`Backend.further` of the sides; measured: whether `fastsim.metrics` sees the scores."""
        totals = no_totals(sides[0].device) if measured and watched() else None
        directions = [name in self.directions for name in DIRECTIONS[1:]]
        cosine = self.similarity == "cosine"
        given = self.numbers, cosine, weights, wants, totals
        found = self.backend.further(sides, directions, *given)
        if totals is not None:
            record_totals(totals)
        return found

    def in_plain_torch(self, anchors, candidates, own, references):
        """The same by its specification."""
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
    def forward(ctx, anchors, candidates, own, references, small):
        sides, ctx.small = (anchors, candidates, own, references), small
        # Of the losses of rows, the gradients from above are weights that are not known yet.
        wants = ctx.needs_input_grad[:3] if small.weight is not None else (False,) * 3
        loss, grads = small.value(sides, small.weight, wants)
        ctx.save_for_backward(*sides, *grads)
        return loss

    @staticmethod
    @differentiable_again(
        lambda ctx, saved, *sides: ctx.small.in_plain_torch(*sides, saved[3]), inputs=3
    )
    def backward(ctx, saved, grad):
        sides, grads = saved[:4], saved[4:]
        wants = ctx.needs_input_grad[:3]
        if ctx.small.weight is None:
            weights = grad.contiguous()
            grads = ctx.small.value(sides, weights, wants, measured=False)[1]
        else:
            grads = (found if found is None else grad * found for found in grads)
        pairs = zip(grads, sides, strict=False)
        return (
            *(found if found is None else found.to(side.dtype) for found, side in pairs),
            None,
            None,
        )

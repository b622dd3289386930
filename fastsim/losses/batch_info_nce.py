"""InfoNCE of a batch of any size, on one or several processes.

The candidates are one tile loss. Further candidates (further_candidates.py) add one log-sum-exp per
row to its softmax; label smoothing adds the mean of a row's scores.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastsim.backends import get
from fastsim.backends.base import Backend
from fastsim.batch_metrics import in_metrics
from fastsim.distributed import join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.later_calls import given_temperature
from fastsim.engine.log_sum_exp import log_sum_exp
from fastsim.engine.one_call import panels_alone
from fastsim.losses.further_candidates import (
    Further,
    above_mean,
    admitted_own_scores,
    dense,
    guide_of,
    log_sum,
    parts_of,
    positive_logits,
)
from fastsim.operators import traced
from fastsim.pairs import (
    Pairs,
    global_exclude,
    global_positives,
    parse_bias,
    parse_exclude,
    parse_positives,
)
from fastsim.precision import compute_dtype, widened
from fastsim.reduce import inverse, over_temperature
from fastsim.scores import dense_scores
from fastsim.tile_loss import TileLoss


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call of `info_nce`.

    anchors (N, D), candidates (M, D), positives (N,), bias (M,), further: those of this rank.
    parts: the further candidates that need panels.
    pairs: this rank's anchors with the candidates of all ranks.
    options: the options that the specification takes too.
    """

    anchors: Tensor
    candidates: Tensor
    positives: Tensor
    bias: Tensor | None
    further: Further
    parts: list
    pairs: Pairs
    batch: Any
    options: dict
    similarity: str
    backend: Backend
    specification: Callable

    def specification_options(self, gather):
        """The options of the specification besides scores and positives.

        gather: a function that gathers tensors of this rank's rows, or returns them unchanged.
        """
        pairs, exclude, guide = self.pairs, None, None
        if pairs.row_ids is not None:
            exclude = gather(pairs.row_ids), pairs.column_ids
        if pairs.guide is not None:
            guide = gather(pairs.guide.rows), pairs.guide.columns
        tensors = {"exclude": exclude, "guide": guide, "candidate_bias": pairs.column_bias}
        return self.options | tensors | {"reduction": "none"}


def batch_info_nce(
    anchors,
    candidates,
    positives,
    further,
    guide,
    *,
    exclude,
    candidate_bias,
    options,
    similarity,
    reduction,
    group,
    backend,
    specification,
):
    """The loss for checked arguments; specification: `info_nce_from_scores`."""
    own = anchors.shape[0], candidates.shape[0], anchors.device
    within, ids = parse_positives(positives, *own), parse_exclude(exclude, *own)
    bias = parse_bias(candidate_bias, candidates.shape[0], anchors)
    batch = join(
        group,
        "info_nce",
        anchors,
        candidates,
        **options,
        exclude=exclude,
        candidate_bias=candidate_bias,
        guide=guide and (guide[1].shape[1], guide[1].dtype),
        directions=further.directions,
        own_negatives=None if further.own_negatives is None else "given",
        references=None if further.references is None else "given",
        similarity=similarity,
        reduction=reduction,
        backend=backend.name,
    )
    margin, strategy = options["guide_margin"], options["guide_strategy"]
    pairs = Pairs(
        global_positives(within, batch),
        *global_exclude(ids, batch),
        exclude_above=options["exclude_above"],
        guide=guide_of(guide, margin, strategy, within, anchors, batch, backend),
        column_bias=batch.gather_columns(bias),
        distinct=positives is None,
    )
    parts = []
    if further.present:
        parts = parts_of(further, anchors, candidates, within, pairs, guide, batch)
    call = Call(
        anchors=anchors,
        candidates=candidates,
        positives=within,
        bias=bias,
        further=further,
        parts=parts,
        pairs=pairs,
        batch=batch,
        options=options,
        similarity=similarity,
        backend=backend,
        specification=specification,
    )
    if _formula_is_faster(call):
        call = replace(call, backend=get("eager"))
    if call.backend.name == "eager":
        return batch.reduce(_dense_losses(call), reduction)
    return _in_panels(call, reduction)


def _formula_is_faster(call):
    """Whether the specification is faster than a pass for each part. It records no metrics."""
    if not call.parts or call.batch.group is not None or in_metrics():
        return False
    if traced() or panels_alone():
        return False
    columns = len(call.candidates) + sum(len(part.columns) for part in call.parts)
    return call.backend.leaves_further(len(call.anchors), columns, call.anchors.device)


def _dense_losses(call):
    """The losses (N,) from the specification, for the rows of all ranks.

    With further candidates they are for this rank's rows alone, as no others are compared with
    them.
    """
    batch, further, more = call.batch, call.further, None
    gather = (lambda rows: rows) if further.present else batch.gather_rows
    columns = batch.gather_columns(call.candidates)
    scores = dense_scores(gather(call.anchors), columns, call.backend, call.similarity)
    if further.present:
        temperature = call.options["temperature"]
        more = dense(call.parts, temperature, call.similarity, call.backend)
        if further.own_negatives is not None:
            more.append(over_temperature(_own_negative_scores(call), temperature))
        more = torch.cat(more, 1)
        if not len(call.anchors):
            # This rank has no losses, but other ranks wait for the gradients of gathered tensors.
            return torch.cat([scores, more], 1).nan_to_num(neginf=0.0).sum(1)
    options = call.specification_options(gather)
    return call.specification(scores, gather(call.pairs.positives), **options, more=more)


def _in_panels(call, reduction):
    """The loss from the passes of the engine."""
    smoothing, batch = call.options["label_smoothing"], call.batch
    scale = inverse(call.options["temperature"], call.anchors)
    alone = not (call.further.present or smoothing)
    if alone:
        return _candidate_losses(call, scale, batch.row_weights(reduction, call.anchors))
    # The backward pass runs in reverse. So the term that needs the most memory comes last here: no
    # gradients of the other terms are alive during its backward pass.
    above = _above_mean(call, scale) if smoothing else None
    losses = (_losses_with_further if call.further.present else _candidate_losses)(call, scale)
    if smoothing:
        losses = losses + smoothing * above
    return batch.reduce(losses, reduction)


def _candidate_losses(call, scale, weights=None):
    """The losses (N,) of the candidates, or with weights their weighted sum."""

    # fastsim/engine/prepared.py keeps this formula, so it must not hold the rows or a temperature.
    options = call.specification_options(lambda rows: rows)
    options |= {"label_smoothing": 0.0, "temperature": None}
    positives, specification = call.pairs.positives, call.specification

    def formula(scores, scale, _):
        return specification(scores, positives, **options | {"temperature": 1 / scale})

    tile = TileLoss(
        "softmax",
        call.pairs,
        margin=float(call.options["margin"]),
        symmetric=call.options["symmetric"],
        cosine=call.similarity == "cosine",
    )
    return tile_loss(
        tile,
        call.anchors,
        call.candidates,
        scale=scale,
        given=given_temperature(call.options["temperature"]),
        weights=weights,
        batch=call.batch,
        formula=formula,
        backend=call.backend,
        summed=weights is not None,
    )


def _losses_with_further(call, scale):
    """The losses (N,) of the candidates and the further candidates."""
    sides = call.anchors, call.candidates, call.positives
    positive = positive_logits(*sides, scale, call.similarity, call.backend)
    both_ways = _goes_both_ways(call)
    parts = [part for part in call.parts if not (both_ways and part.turned)]
    sums = [log_sum(part, scale, positive, call.similarity, call.backend) for part in parts]
    if call.further.own_negatives is not None:
        logits = over_temperature(widened(_own_negative_scores(call)), 1 / scale)
        sums.append(torch.logsumexp(logits, 1))
    if both_ways:
        options = {"similarity": call.similarity, "backend": call.backend.name}
        of_rows, of_columns = log_sum_exp(*sides[:2], scale=scale, columns=True, **options)
        sums += of_rows, of_columns[call.positives]
        return (torch.logsumexp(torch.stack(sums), 0) - positive).to(compute_dtype(call.anchors))
    positive = positive - scale * call.options["margin"]
    if call.bias is not None:
        positive = positive + call.bias[call.positives]
    further = torch.logsumexp(torch.stack(sums), 0) - positive
    losses = _candidate_losses(call, scale)
    return torch.logaddexp(widened(losses), further).to(losses.dtype)


def _goes_both_ways(call):
    """Whether one pass over the candidates gives the log-sum-exps of both rows and columns.

    It is faster if a part consists of these columns. Such a pass has no margin and no metrics.
    """
    turned = any(part.turned for part in call.parts)
    return turned and call.options["margin"] == 0 and not in_metrics()


def _above_mean(call, scale):
    """(N,) the logit of the positive minus the mean logit of all candidates."""
    sides = call.anchors, call.candidates, call.positives
    above = scale * above_mean(*sides, call.similarity, call.batch, call.backend)
    if call.bias is None:
        return above
    return above + (call.bias[call.positives] - call.pairs.column_bias.mean())


def _own_negative_scores(call):
    """(N, K) the scores of the own negatives, -inf for those that `exclude_above` leaves out."""
    sides = call.anchors, call.candidates, call.positives, call.options["exclude_above"]
    return admitted_own_scores(call.further, *sides, call.backend, call.similarity)

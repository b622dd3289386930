"""InfoNCE of a batch of any size, on one process or several.

The candidates are one tile loss. Further candidates (further_candidates.py) join its softmax as one
log-sum-exp a row, and label smoothing as the mean of a row's scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastsim.backends.base import Backend
from fastsim.batch_metrics import watched
from fastsim.distributed import join
from fastsim.engine.autograd import tile_loss
from fastsim.engine.log_sum_exp import log_sum_exp
from fastsim.losses.further_candidates import (
    Further,
    above_mean,
    dense,
    guide_of,
    log_sum,
    own_scores,
    parts_of,
    positive_logits,
)
from fastsim.pairs import (
    Pairs,
    global_exclude,
    global_positives,
    parse_bias,
    parse_exclude,
    parse_positives,
)
from fastsim.precision import widened
from fastsim.reduce import inverse, over_temperature
from fastsim.scores import compute_dtype, dense_scores
from fastsim.ties import highest_equal, size_of_rows
from fastsim.tile import Tile


@dataclass(frozen=True)
class Asked:
    """What `info_nce` was asked for.

    anchors (N, D), candidates (M, D), positives (N,), bias (M,) and further are this rank's; the
    columns of pairs are those of all ranks. parts: the further candidates that need panels.
    options: the loss's own, as its specification takes them.
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

    def of_specification(self, gather):
        """What the specification takes beside scores and positives; gather: of rows."""
        pairs, exclude, guide = self.pairs, None, None
        if pairs.row_ids is not None:
            exclude = gather(pairs.row_ids), pairs.column_ids
        if pairs.guide is not None:
            guide = gather(pairs.guide.rows), pairs.guide.columns
        given = {"exclude": exclude, "guide": guide, "candidate_bias": pairs.column_bias}
        return self.options | given | {"reduction": "none"}


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
    """The loss of checked arguments; specification: `info_nce_from_scores`."""
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
        guided=guide is not None,
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
    if further.given:
        parts = parts_of(further, anchors, candidates, within, pairs, guide, batch)
    asked = Asked(
        anchors,
        candidates,
        within,
        bias,
        further,
        parts,
        pairs,
        batch,
        options,
        similarity,
        backend,
        specification,
    )
    if backend.name == "eager":
        return batch.reduce(_dense_losses(asked), reduction)
    return _in_panels(asked, reduction)


def _dense_losses(asked):
    """Losses by the specification: (N,), or of the rows of all ranks without further candidates."""
    batch, further, more = asked.batch, asked.further, None
    # Further candidates are compared with this rank's rows alone.
    gather = (lambda rows: rows) if further.given else batch.gather_rows
    columns = batch.gather_columns(asked.candidates)
    scores = dense_scores(gather(asked.anchors), columns, asked.backend, asked.similarity)
    if further.given:
        temperature = asked.options["temperature"]
        more = dense(asked.parts, temperature, asked.similarity, asked.backend)
        if further.own_negatives is not None:
            more.append(over_temperature(_of_own_negatives(asked), temperature))
        more = torch.cat(more, 1)
        if not len(asked.anchors):
            # Nothing to add, but other ranks wait for the gradients of what they gathered.
            return torch.cat([scores, more], 1).nan_to_num(neginf=0.0).sum(1)
    given = asked.of_specification(gather)
    return asked.specification(scores, gather(asked.pairs.positives), **given, more=more)


def _in_panels(asked, reduction):
    """The loss by the engine's passes."""
    smoothing, batch = asked.options["label_smoothing"], asked.batch
    scale = inverse(asked.options["temperature"], asked.anchors)
    alone = not (asked.further.given or smoothing)
    if alone:
        return _of_candidates(asked, scale, batch.row_weights(reduction, asked.anchors))
    # The backward pass goes the other way: what needs the most memory is then last here, when no
    # gradients of the others are alive beside it.
    above = _above_mean(asked, scale) if smoothing else None
    losses = (_with_further if asked.further.given else _of_candidates)(asked, scale)
    if smoothing:
        losses = losses + smoothing * above
    return batch.reduce(losses, reduction)


def _of_candidates(asked, scale, weights=None):
    """The tile loss of the candidates: with weights their sum, else (N,)."""

    # What is kept of a signature (fastsim/engine/prepared.py) holds the formula, so no rows in it.
    given = asked.of_specification(lambda rows: rows) | {"label_smoothing": 0.0}
    positives, specification = asked.pairs.positives, asked.specification

    def formula(scores, scale, _):
        return specification(scores, positives, **given | {"temperature": 1 / scale})

    tile = Tile(
        "softmax",
        asked.pairs,
        margin=float(asked.options["margin"]),
        symmetric=asked.options["symmetric"],
        cosine=asked.similarity == "cosine",
    )
    return tile_loss(
        tile,
        asked.anchors,
        asked.candidates,
        scale=scale,
        weights=weights,
        batch=asked.batch,
        formula=formula,
        backend=asked.backend,
        summed=weights is not None,
    )


def _with_further(asked, scale):
    """(N,) losses of the candidates and further ones."""
    sides = asked.anchors, asked.candidates, asked.positives
    positive = positive_logits(*sides, scale, asked.similarity, asked.backend)
    both_ways = _goes_both_ways(asked)
    parts = [part for part in asked.parts if not (both_ways and part.turned)]
    sums = [log_sum(part, scale, positive, asked.similarity, asked.backend) for part in parts]
    if asked.further.own_negatives is not None:
        logits = over_temperature(widened(_of_own_negatives(asked)), 1 / scale)
        sums.append(torch.logsumexp(logits, 1))
    if both_ways:
        options = {"similarity": asked.similarity, "backend": asked.backend.name}
        of_rows, of_columns = log_sum_exp(*sides[:2], scale=scale, columns=True, **options)
        sums += of_rows, of_columns[asked.positives]
        return (torch.logsumexp(torch.stack(sums), 0) - positive).to(compute_dtype(asked.anchors))
    positive = positive - scale * asked.options["margin"]
    if asked.bias is not None:
        positive = positive + asked.bias[asked.positives]
    further = torch.logsumexp(torch.stack(sums), 0) - positive
    losses = _of_candidates(asked, scale)
    return torch.logaddexp(widened(losses), further).to(losses.dtype)


def _goes_both_ways(asked):
    """Whether one pass over the candidates' scores gives the log-sum-exps of rows and of columns.

    It pays where a part is made of these columns. Such a pass has no margin and no metrics.
    """
    turned = any(part.turned for part in asked.parts)
    return turned and asked.options["margin"] == 0 and not watched()


def _above_mean(asked, scale):
    """(N,) by how much the positive's logit is above the mean of all candidates'."""
    sides = asked.anchors, asked.candidates, asked.positives
    above = scale * above_mean(*sides, asked.similarity, asked.batch, asked.backend)
    if asked.bias is None:
        return above
    return above + (asked.bias[asked.positives] - asked.pairs.column_bias.mean())


def _of_own_negatives(asked):
    """(N, K) scores of the own negatives, -inf for what `exclude_above` leaves out."""
    scores = own_scores(asked.further, asked.anchors, asked.backend, asked.similarity)
    above = asked.options["exclude_above"]
    if above is None:
        return scores
    sides = asked.anchors, asked.candidates, asked.positives
    positive = positive_logits(*sides, 1.0, asked.similarity, asked.backend).to(scores.dtype)
    known, limits = scores.detach(), (positive + above).detach()[:, None]
    return scores.masked_fill(known > highest_equal(limits, size_of_rows(known)), -torch.inf)

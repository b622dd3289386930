"""InfoNCE of a small batch with a guide, further candidates or label smoothing.

A guide's cosines of all pairs are at hand, so that one call of the backend makes the rest.

Further candidates, or label smoothing: one softmax over all of them. Of a large batch each part
(further_candidates.py) is a log-sum-exp of the engine, and what lies between these takes longer
than a small batch's scores. Here the scores of all parts are one matrix, a row's positive at its
own place:

    candidates | anchors (query_to_query) | references | anchors (doc_to_query)
        | candidates (doc_to_doc) | own negatives
"""

from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from fastsim.batch_metrics import nothing_seen, record, watched
from fastsim.engine.autograd import tile_loss
from fastsim.engine.dense import cosines_of, serves_dense
from fastsim.engine.passes import is_small
from fastsim.engine.prepared import Prepared
from fastsim.losses.further_candidates import guide_of_all
from fastsim.pairs import Pairs
from fastsim.scores import unit_rows
from fastsim.tile import Tile


def small_info_nce(
    anchors,
    candidates,
    further,
    guide,
    *,
    scale,
    label_smoothing,
    similarity,
    reduction,
    backend,
    options,
    formula,
):
    """(the loss as a function of tensors, these tensors), or None where that is not for it.

    The tensors: anchors (N, D), candidates (M, D), then those of the guide, or own negatives
    (N, K, D) and references (R, D) where `further` has them. options: the loss's own, as `formula`
    takes them, its specification.
    """
    alone = not (further or label_smoothing)
    if alone and guide is not None:
        tile = Tile(
            "softmax",
            Pairs(_places(anchors)),
            margin=float(options["margin"]),
            symmetric=options["symmetric"],
            cosine=similarity == "cosine",
        )
        weight = {"mean": 1 / anchors.shape[0], "sum": 1.0, "none": None}[reduction]
        if not is_small(tile, anchors, candidates, weight, backend):
            return None
        given = {"tile": tile, "scale": scale, "weight": weight, "backend": backend}
        given |= {"options": options, "formula": formula}
        return Prepared(partial(_guided, **given)), (anchors, candidates, *guide)
    if alone or guide is not None or similarity != "cosine":
        return None
    rows, columns = anchors.shape[0], candidates.shape[0]
    widths = {"query_to_query": rows, "doc_to_query": rows, "doc_to_doc": columns}
    counts = [widths.get(direction, 0) for direction in further.directions]
    own, references = further.own_negatives, further.references
    counts += [0 if own is None else own.shape[1], 0 if references is None else len(references)]
    if not serves_dense(rows, columns + sum(counts), backend):
        return None
    function = partial(
        _loss,
        directions=further.directions,
        own=own is not None,
        scale=scale,
        margin=scale * options["margin"],
        places=_places(anchors),
        smoothing=label_smoothing,
        reduction=reduction,
        backend=backend,
    )
    sides = anchors, candidates, own, references
    return Prepared(function), [side for side in sides if side is not None]


def _places(anchors):
    """(N,) the columns of the positives, a row's own."""
    return torch.arange(anchors.shape[0], device=anchors.device)


def _guided(anchors, candidates, *guide, tile, scale, weight, backend, options, formula):
    margin, strategy = options["guide_margin"], options["guide_strategy"]
    places = tile.pairs.positives
    decided = guide_of_all(guide, margin, strategy, places, anchors, backend)

    def losses(scores, scale, _):
        given = options | {"temperature": 1 / scale, "reduction": "none"}
        return formula(scores, places, **given, guide=(decided.rows, decided.columns))

    tile = replace(tile, pairs=replace(tile.pairs, guide=decided))
    given = {"scale": scale, "weights": weight, "formula": losses, "backend": backend}
    return tile_loss(tile, anchors, candidates, **given, summed=True)


def _offsets(scores, columns, references, directions, margin):
    """(N, W) what is added to the logits: -inf where a row meets itself, less the margin at its
    positive; None where there is nothing to add.
    """
    if not margin and not {"query_to_query", "doc_to_doc"} & {*directions}:
        return None
    offsets, rows, first = torch.zeros_like(scores), len(scores), columns
    offsets[:, :columns].fill_diagonal_(-margin)
    if "query_to_query" in directions:
        offsets[:, first : first + rows].fill_diagonal_(-torch.inf)
        first += rows
    first += references + (rows if "doc_to_query" in directions else 0)
    if "doc_to_doc" in directions:
        offsets[:, first : first + columns].fill_diagonal_(-torch.inf)
    return offsets


def _loss(
    anchors,
    candidates,
    *more,
    directions,
    own,
    scale,
    margin,
    places,
    smoothing,
    reduction,
    backend,
):
    of_anchors = [candidates]
    if "query_to_query" in directions:
        of_anchors.append(anchors)
    of_anchors += [references.detach() for references in more[own:]]
    scores = [cosines_of(anchors, _joined(of_anchors, 0), backend)]
    if watched():
        seen = nothing_seen(len(anchors), anchors.device)
        backend.observe(scores[0][:, : len(candidates)], Pairs(places), seen)
        other = None if candidates is anchors else candidates
        record(seen, anchors, other, cosine=True, batch=None, backend=backend)
    of_documents = [anchors] if "doc_to_query" in directions else []
    of_documents += [candidates] if "doc_to_doc" in directions else []
    if of_documents:
        documents = candidates[: len(anchors)]
        scores.append(cosines_of(documents, _joined(of_documents, 0), backend))
    if own:
        scores.append(_of_own(anchors, more[0], backend))
    scores = _joined(scores, 1)
    references = sum(map(len, more[own:]))
    offsets = _offsets(scores.detach(), len(candidates), references, directions, margin)
    logits = scale * scores if offsets is None else torch.add(offsets, scores, alpha=scale)
    return cross_entropy(logits, places, label_smoothing=smoothing, reduction=reduction)


def _of_own(anchors, negatives, backend):
    """(N, K) cosines of each row with its own negatives (N, K, D)."""
    rows = unit_rows(anchors, backend)
    return (unit_rows(negatives.flatten(0, 1), backend).view(negatives.shape) * rows[:, None]).sum(
        2
    )


def _joined(parts, axis):
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)

"""InfoNCE in one call: with positives, pairs that are left out or biased, further candidates."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from fastsim.backends.base import Backend
from fastsim.distributed import join
from fastsim.engine.later_calls import scale_of
from fastsim.engine.one_call_loss import OneCallLoss
from fastsim.engine.sweep import asked_widths
from fastsim.losses.call_tensors import explain, placeholders, with_tensors
from fastsim.losses.further_in_one_call import FurtherLoss
from fastsim.pairs import Pairs, parse_bias, parse_exclude, parse_positives
from fastsim.tile_loss import TileLoss


def info_nce_in_one_call(
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
    backend,
    specification,
):
    """(function, tensors), so that function(*tensors) is the loss; None if one call cannot do it.

    All arguments but `exclude` and the values of `positives` and `candidate_bias` are checked.

    tensors: anchors (N, D) and candidates (M, D); then those of temperature, positives (N,), ids
        (N,) and (M,), bias (M,), own negatives (N, K, D), references (R, D) and guide (two) that
        are present.
    options: the options of `specification`, the specification of the loss.
    """
    pairs_change = any(v is not None for v in (positives, exclude, guide, candidate_bias))
    with_further = further.present or options["label_smoothing"]
    if not (with_further or pairs_change) or (len(further.directions) > 1 and pairs_change):
        return None
    if asked_widths() is not None and not with_further and guide is None and candidate_bias is None:
        return None  # `tile_loss` may sum it over prefixes
    sides = anchors, candidates, positives
    tile = _tile(*sides, guide, exclude, candidate_bias, options, similarity)
    row_ids, column_ids = (None, None) if exclude is None else exclude
    given = {
        "temperature": options["temperature"],
        "positives": positives,
        "row_ids": row_ids,
        "column_ids": column_ids,
        "candidate_bias": candidate_bias,
        "own_negatives": further.own_negatives,
        "references": further.references,
        "guide_rows": guide and guide[0],
        "guide_columns": guide and guide[1],
    }
    given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    tensors = anchors, candidates, *given.values()
    batch = join(None, "info_nce", anchors, candidates)
    shared = {
        "names": tuple(given),
        "temperature": None if "temperature" in given else options["temperature"],
        "weight": batch.row_weights(reduction, anchors),
        "backend": backend,
        "formula": specification,
    }
    # The loss is kept for later calls, so it holds no tensor of this one.
    options = options | {"temperature": None}
    if with_further:
        loss = FurtherLoss(
            **shared,
            tile=_smoothed(tile, candidates, float(options["label_smoothing"])),
            directions=further.directions,
            batch=batch,
            options=options | {"reduction": reduction},
        )
        if not loss.serves(*tensors) and loss.formula_is_faster(*tensors):
            loss = loss._replace(by_formula=True)
    else:
        loss = PairedLoss(**shared, tile=tile, options=options | {"reduction": "none"})
    return (loss, tensors) if loss.serves(*tensors) else None


def _tile(anchors, candidates, positives, guide, exclude, bias, options, similarity):
    """The `TileLoss` with empty tensors in the places of those given (`with_tensors`)."""
    sizes = anchors.shape[0], candidates.shape[0], anchors.device
    if bias is not None:
        bias = parse_bias(bias, sizes[1], anchors)
    guide, bias = placeholders(guide, bias, options)
    own, (row_ids, column_ids) = parse_positives(positives, *sizes), parse_exclude(exclude, *sizes)
    if positives is not None:
        own = own.new_empty(0)
    if exclude is not None:
        row_ids, column_ids = row_ids.new_empty(0), column_ids.new_empty(0)
    pairs = Pairs(
        own,
        row_ids,
        column_ids,
        exclude_above=options["exclude_above"],
        guide=guide,
        column_bias=bias,
        distinct=positives is None,
    )
    return TileLoss(
        "softmax",
        pairs,
        margin=float(options["margin"]),
        symmetric=options["symmetric"],
        cosine=similarity == "cosine",
    )


def _smoothed(tile, candidates, label_smoothing):
    """The tile with a target for every candidate, the largest for the positive.

    The targets are relative to the positive's; `normalise` divides them by their sum.
    """
    if not label_smoothing:
        return tile
    count = candidates.shape[0]
    share = label_smoothing / count
    pairs = replace(
        tile.pairs,
        row_groups=tile.pairs.positives,
        column_groups=torch.arange(count, device=candidates.device),
        negative_target=share / (1 - label_smoothing + share),
    )
    return replace(tile, pairs=pairs, normalise=True)


class PairedLoss(NamedTuple):
    """The loss as a function of anchors (N, D), candidates (M, D) and the tensors in `names`.

    The fields are those of `FurtherLoss`.
    """

    tile: TileLoss
    names: tuple
    temperature: float | None
    weight: float | None
    backend: Backend
    formula: Callable
    options: dict

    def serves(self, anchors, candidates, *_):
        """Whether one call can compute the loss for these sizes and settings."""
        one_call = self.of_tile(self.tile, 1.0)
        return one_call.serves(anchors, None if candidates is anchors else candidates)

    def of_tile(self, tile, scale):
        """The loss for a tile with all tensors."""
        pairs = tile.pairs

        def losses(scores, scale, _):
            exclude = None if pairs.row_ids is None else (pairs.row_ids, pairs.column_ids)
            tensors = {
                "temperature": 1 / scale,
                "exclude": exclude,
                "guide": pairs.guide and (pairs.guide.rows, pairs.guide.columns),
                "candidate_bias": pairs.column_bias,
            }
            return self.formula(scores, pairs.positives, **self.options | tensors)

        return OneCallLoss(tile, scale, 0.0, self.weight, losses, self.backend, for_metrics=True)

    def __call__(self, anchors, candidates, *tensors):
        given = dict(zip(self.names, tensors, strict=True))
        tile = with_tensors(self.tile, anchors, candidates, self.backend, given)
        scale = scale_of(given.get("temperature", self.temperature), anchors)
        try:
            return self.of_tile(tile, scale)(anchors, candidates)
        except RuntimeError:
            explain(tile)
            raise

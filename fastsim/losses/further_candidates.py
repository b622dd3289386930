"""Further candidates of InfoNCE: more terms in a row's softmax, as log-sum-exps of the engine.

    query_to_query  a_i . a_j, j != i             own_negatives  a_i . n_ik, for row i only
    doc_to_query    c_{pos_i} . a_j               references     a_i . r_j, no gradient to r
    doc_to_doc      c_{pos_i} . c_j, j != pos_i

Each part keeps one number per row; the backward pass computes its scores again.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastsim.backends.rows import take_rows
from fastsim.checks import (
    FLOATING,
    check_alike,
    check_choice,
    check_device,
    check_embeddings,
    check_tensor,
)
from fastsim.engine.autograd import tile_loss
from fastsim.engine.bands import by_bands
from fastsim.engine.log_sum_exp import as_guide, guide_beside, guide_cosines, safe_log_sum_exp
from fastsim.pairs import Pairs, pair_mask
from fastsim.precision import compute_dtype, wide_dtype, widened
from fastsim.scores import dense_scores, paired_scores, unit_rows
from fastsim.ties import highest_equal, size_of_rows
from fastsim.tile_loss import TileLoss

FIRST = "query_to_doc"
DIRECTIONS = (FIRST, "query_to_query", "doc_to_query", "doc_to_doc")
GUIDE_STRATEGIES = ("absolute", "relative")


@dataclass(frozen=True)
class Further:
    """The arguments of a loss that add further candidates."""

    directions: tuple
    own_negatives: torch.Tensor | None
    references: torch.Tensor | None

    @property
    def present(self):
        """Whether there are further candidates."""
        embeddings = self.own_negatives, self.references
        return len(self.directions) > 1 or any(side is not None for side in embeddings)

    @property
    def in_panels(self):
        """Whether there are others than own negatives, which need no panel of scores."""
        return len(self.directions) > 1 or self.references is not None


def further_of(anchors, directions, own_negatives, references):
    """The `Further` of the arguments of `info_nce`; ValueError or TypeError if they do not fit.

    References without a row, such as a queue before the first batch, count as None.
    """
    if not isinstance(directions, (tuple, list)):
        raise TypeError(f"directions: wanted a tuple of names, got {directions!r:.60}")
    for direction in directions:
        check_choice("directions", direction, DIRECTIONS)
    if FIRST not in directions or len({*directions}) < len(directions):
        raise ValueError(
            f"directions: wanted {FIRST!r} among them and none twice, got {tuple(directions)!r}"
        )
    if references is not None:
        check_embeddings("references", references, empty=True)
        check_alike("references", references, "anchors", anchors)
        references = references if references.shape[0] else None
    if own_negatives is not None:
        what = "floating-point embeddings (N, K, D)"
        wanted = {"ndim": 3, "dtypes": FLOATING, "what": what, "empty": not len(anchors)}
        check_tensor("own_negatives", own_negatives, **wanted)
        check_alike("own_negatives", own_negatives, "anchors", anchors, rows=True)
    return Further(tuple(directions), own_negatives, references)


@dataclass(frozen=True)
class Part:
    """Rows (N, D) against the columns of this rank or, with a batch, of all its ranks.

    pairs: which pairs take part; positives, if there are any, always do.
    turned: whether row i of the scores is a column of the scores of anchors with candidates: the
        column of i's positive. This holds if neither leaves out or adds anything.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    pairs: Pairs
    batch: object = None
    turned: bool = False


class _Ids(NamedTuple):
    """The ids by which a part leaves out pairs.

    Without `exclude` the index of a row or column is its id, so that only the pair of a row with
    itself is left out.
    """

    anchors: torch.Tensor  # (N,) of this rank
    all_anchors: torch.Tensor  # of all ranks
    positives: torch.Tensor  # (N,) of this rank
    all_candidates: torch.Tensor  # of all ranks


def _ids(pairs, rows, batch):
    """The `_Ids`. rows: (N,) the indices of this rank's anchors among those of all ranks."""
    if pairs.row_ids is None:
        counts = batch.rows, batch.columns
        all_rows, all_columns = (torch.arange(count, device=rows.device) for count in counts)
        return _Ids(rows, all_rows, pairs.positives, all_columns)
    all_rows = batch.gather_rows(pairs.row_ids)
    return _Ids(pairs.row_ids, all_rows, pairs.column_ids[pairs.positives], pairs.column_ids)


def parts_of(further, anchors, candidates, own, pairs, guide, batch):
    """The list of `Part`s for the directions and references.

    own: (N,) the column of each positive among the candidates of this rank.
    pairs: those of anchors with candidates.
    guide: (rows (N, E), columns (M, E)) of this rank, or None; `pairs` has its thresholds.
    """
    count, first = anchors.shape[0], batch.own_rows.start
    rows = torch.arange(first, first + count, device=anchors.device)
    ids = _ids(pairs, rows, batch)
    anchors_as_columns = replace(batch, column_counts=batch.row_counts)
    in_order = pairs.distinct and len(candidates) == count  # candidate i is anchor i's positive
    documents = candidates if in_order else take_rows(candidates, own)

    def guided(part_pairs, guide_rows, guide_columns):
        sides = guide_rows, guide_columns, pairs.guide.thresholds
        checked = as_guide(sides, len(guide_rows), len(guide_columns), anchors)
        return replace(part_pairs, guide=checked)

    parts = []
    if "query_to_query" in further.directions:
        part_pairs = Pairs(row_ids=ids.anchors, column_ids=ids.all_anchors)
        if guide is not None:
            part_pairs = guided(part_pairs, guide[0], batch.gather_rows(guide[0]))
        parts.append(Part(anchors, anchors, part_pairs, anchors_as_columns))
    if "doc_to_query" in further.directions:
        part_pairs = Pairs(rows)
        if pairs.row_ids is not None:
            part_pairs = replace(part_pairs, row_ids=ids.positives, column_ids=ids.all_anchors)
        if guide is not None:
            part_pairs = guided(part_pairs, guide[1][own], batch.gather_rows(guide[0]))
        options = pairs.row_ids, guide, pairs.column_bias, batch.group
        turned = all(option is None for option in options)
        parts.append(Part(documents, anchors, part_pairs, anchors_as_columns, turned))
    if "doc_to_doc" in further.directions:
        part_pairs = Pairs(
            row_ids=ids.positives, column_ids=ids.all_candidates, column_bias=pairs.column_bias
        )
        if guide is not None:
            part_pairs = guided(part_pairs, guide[1][own], batch.gather_columns(guide[1]))
        parts.append(Part(documents, candidates, part_pairs, batch))
    if further.references is not None:
        parts.append(Part(anchors, further.references.detach(), Pairs()))
    return parts


def own_scores(further, anchors, backend, similarity):
    """(N, K) the scores of each anchor with its own negatives."""
    dtype = compute_dtype(anchors)

    def scores(rows, negatives, _):
        rows, negatives = rows.to(dtype), negatives.to(dtype)
        if similarity == "cosine":
            rows = unit_rows(rows, backend)
            negatives = unit_rows(negatives.flatten(0, 1), backend).view(negatives.shape)
        return (negatives * rows[:, None]).sum(2)

    return by_bands(scores, anchors, further.own_negatives)


def admitted_own_scores(further, anchors, candidates, own, above, backend, similarity):
    """`own_scores`, -inf for scores that exceed that of the positive by more than `above`.

    own: (N,) the column of each positive. above: None leaves out nothing.
    """
    scores = own_scores(further, anchors, backend, similarity)
    if above is None:
        return scores
    positive = positive_logits(anchors, candidates, own, 1.0, similarity, backend)
    known, limits = scores.detach(), (positive.to(scores.dtype) + above).detach()[:, None]
    return scores.masked_fill(known > highest_equal(limits, size_of_rows(known)), -torch.inf)


def dense(parts, temperature, similarity, backend):
    """The logits [(N, R)] of the parts, -inf if a pair is left out."""
    all_logits = []
    for part in parts:
        gather = (lambda t: t) if part.batch is None else part.batch.gather_columns
        scores = dense_scores(part.rows, gather(part.columns), backend, similarity)
        kept = pair_mask(part.pairs, *scores.shape, scores.device)
        logits = scores / temperature
        if part.pairs.column_bias is not None:
            logits = logits + part.pairs.column_bias
        all_logits.append(logits.masked_fill(~kept, -torch.inf))
    return all_logits


def log_sum(part, scale, positive, similarity, backend):
    """(N,) the log-sum-exps of the logits of a part, in the type of sums.

    positive: (N,) the logits of its positives.
    """
    targeted = part.pairs.positives is not None

    def formula(scores, scale, _):
        kept = pair_mask(part.pairs, *scores.shape, scores.device)
        logits = scores * scale
        if part.pairs.column_bias is not None:
            logits = logits + part.pairs.column_bias
        sums = safe_log_sum_exp(logits.masked_fill(~kept, -torch.inf), kept, 1)
        if not targeted:
            return sums
        return sums - logits.gather(1, part.pairs.positives[:, None])[:, 0]

    losses = tile_loss(
        TileLoss("softmax", part.pairs, cosine=similarity == "cosine"),
        part.rows,
        part.columns,
        scale=scale,
        batch=part.batch,
        formula=formula,
        backend=backend,
        for_metrics=False,
    )
    return widened(losses) + positive if targeted else losses


def guide_of(guide, margin, strategy, own, x, batch, backend):
    """The `Guide` of anchors with the candidates of all ranks, or None.

    The thresholds are t_i - margin, or t_i - |t_i| margin for the strategy "relative"; t_i is the
    guide's cosine of row i's positive.
    """
    if guide is None:
        return None
    rows, columns = guide_beside(x, *guide)
    if len(rows):
        cosines = guide_cosines(rows, columns[own], backend=backend.name)
    else:  # a rank without rows
        cosines = rows.new_zeros(0, dtype=compute_dtype(rows))
    columns = batch.gather_columns(columns)
    thresholds = _thresholds(cosines, margin, strategy)
    return as_guide((rows, columns, thresholds), len(rows), len(columns), x)


def _thresholds(cosines, margin, strategy):
    """The largest allowed cosines of a guide, from the cosines of the positives."""
    return cosines - (cosines.abs() if strategy == "relative" else 1.0) * margin


def positive_logits(anchors, candidates, own, scale, similarity, backend):
    """(N,) the logits of the positives, in the type of sums."""
    dtype = compute_dtype(anchors)

    def scores(rows, columns, _):
        return paired_scores(rows.to(dtype), columns.to(dtype), backend, similarity)

    return scale * widened(by_bands(scores, anchors, candidates, index=own))


def dense_guide(guide, margin, strategy, positives, scores):
    """`guide_of` for the dense specification, whose scores are (N, M)."""
    if guide is None:
        return None
    rows, columns = guide_beside(scores, *guide)
    cosines = guide_cosines(rows, columns[positives], backend="eager")
    thresholds = _thresholds(cosines, margin, strategy)
    return as_guide((rows, columns, thresholds), *scores.shape, scores)


def check_guide(guide, anchors, candidates):
    """Raises a TypeError or ValueError for a guide that does not fit."""
    if guide is None:
        return
    if not isinstance(guide, (tuple, list)) or len(guide) != 2:
        raise TypeError(f"guide: wanted (anchors (N, E), candidates (M, E)), got {guide!r:.60}")
    for place, (side, other) in enumerate(zip(guide, (anchors, candidates), strict=True)):
        check_embeddings(f"guide[{place}]", side, empty=not len(other))
        if len(side) != len(other):
            raise ValueError(f"guide[{place}]: wanted {len(other)} rows, got {len(side)}")
    check_device("guide[0]", guide[0], "anchors", anchors)
    check_alike("guide[1]", guide[1], "guide[0]", guide[0])


def above_mean(anchors, candidates, own, similarity, batch, backend):
    """(N,) the score of the positive minus the mean score of the candidates of all ranks.

    It is the product with the difference of two rows, so it is exactly 0 for a single candidate.
    """
    dtype, wide = compute_dtype(anchors), wide_dtype(anchors.device)
    # Once, so that the gradient of a candidate, a sum of terms that nearly cancel, is rounded once.
    candidates = candidates.to(dtype)

    def scored(rows):
        rows = rows.to(dtype)
        return unit_rows(rows, backend) if similarity == "cosine" else rows

    def column_sum(columns, *_):
        return scored(columns).sum(0, dtype=wide)

    def above(rows, columns, mean):
        return (scored(rows) * (scored(columns) - mean)).sum(1)

    total = batch.total_with_gradient(by_bands(column_sum, candidates, summed=True))
    return by_bands(above, anchors, candidates, (total / batch.columns).to(dtype), index=own)

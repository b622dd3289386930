"""Further terms of a row's softmax, beside its candidates, as log-sum-exps of the engine.

    query_to_query  a_i . a_j, j != i             own_negatives  a_i . n_ik, of row i alone
    doc_to_query    c_{pos_i} . a_j               references     a_i . r_j, no gradient to r
    doc_to_doc      c_{pos_i} . c_j, j != pos_i

Each part keeps one number per row; its scores are computed again for the gradient.
"""

from dataclasses import dataclass, replace

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
from fastsim.precision import wide_dtype, widened
from fastsim.scores import compute_dtype, dense_scores, paired_scores, unit_rows
from fastsim.tile import Tile

FIRST = "query_to_doc"
DIRECTIONS = (FIRST, "query_to_query", "doc_to_query", "doc_to_doc")
GUIDE_STRATEGIES = ("absolute", "relative")


def as_directions(names):
    """The argument `directions` as a tuple."""
    if not isinstance(names, (tuple, list)):
        raise TypeError(f"directions: wanted a tuple of names, got {names!r:.60}")
    return tuple(names)


@dataclass(frozen=True)
class Further:
    """The arguments of a loss that name further candidates."""

    directions: tuple
    own_negatives: torch.Tensor | None
    references: torch.Tensor | None

    @property
    def given(self):
        """Whether there are any."""
        embeddings = self.own_negatives, self.references
        return len(self.directions) > 1 or any(side is not None for side in embeddings)

    @property
    def in_panels(self):
        """Whether there are any but a row's own negatives, which need no panel of scores."""
        return len(self.directions) > 1 or self.references is not None

    def check(self, anchors):
        """ValueError or TypeError for arguments that do not fit."""
        for direction in self.directions:
            check_choice("directions", direction, DIRECTIONS)
        if FIRST not in self.directions or len({*self.directions}) < len(self.directions):
            raise ValueError(
                f"directions: wanted {FIRST!r} among them and none twice, got {self.directions!r}"
            )
        if self.references is not None:
            check_embeddings("references", self.references)
            check_alike("references", self.references, "anchors", anchors)
        if self.own_negatives is not None:
            what = "floating-point embeddings (N, K, D)"
            given = {"ndim": 3, "dtypes": FLOATING, "what": what, "empty": not len(anchors)}
            check_tensor("own_negatives", self.own_negatives, **given)
            check_alike("own_negatives", self.own_negatives, "anchors", anchors, rows=True)


@dataclass(frozen=True)
class Part:
    """Rows (N, D) against columns of this rank or, with a batch, of all its ranks.

    pairs: with these columns; one that has positives keeps them whatever else holds.
    turned: nothing is left out or added, here or among the candidates. So row i of its scores is
        a column of those of anchors with candidates: that of i's positive.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    pairs: Pairs
    batch: object = None
    turned: bool = False


def parts_of(further, anchors, candidates, own, pairs, guide, batch):
    """The `Part`s of the directions and references.

    own (N,): the columns of the positives among this rank's; where no positives were asked for the
    first N, which may be every one. pairs: of anchors with candidates.
    guide: (rows (N, E), columns (M, E)) of this rank, or None; thresholds are those of `pairs`.
    """
    device = anchors.device
    count, first = anchors.shape[0], batch.own_rows.start
    rows = torch.arange(first, first + count, device=device)
    everyone = torch.arange(batch.rows, device=device)
    of_anchors = replace(batch, column_counts=batch.row_counts)
    row_ids, column_ids = pairs.row_ids, pairs.column_ids
    excluded = row_ids is not None
    all_rows = batch.gather_rows(row_ids) if excluded else everyone
    columns = torch.arange(batch.columns, device=device)
    of_docs = column_ids[pairs.positives] if excluded else pairs.positives

    def guided(of_rows, of_columns):
        if guide is None:
            return None
        thresholds = pairs.guide.thresholds
        return as_guide((of_rows, of_columns, thresholds), len(of_rows), len(of_columns), anchors)

    every = pairs.distinct and len(candidates) == count
    found = []
    if "query_to_query" in further.directions:
        rule = Pairs(row_ids=row_ids if excluded else rows, column_ids=all_rows)
        if guide is not None:
            rule = replace(rule, guide=guided(guide[0], batch.gather_rows(guide[0])))
        found.append(Part(anchors, anchors, rule, of_anchors))
    documents = candidates if every else take_rows(candidates, own)
    if "doc_to_query" in further.directions:
        rule = Pairs(rows)
        if excluded:
            rule = replace(rule, row_ids=of_docs, column_ids=all_rows)
        if guide is not None:
            rule = replace(rule, guide=guided(guide[1][own], batch.gather_rows(guide[0])))
        turned = all(rule is None for rule in (row_ids, guide, pairs.column_bias, batch.group))
        found.append(Part(documents, anchors, rule, of_anchors, turned))
    if "doc_to_doc" in further.directions:
        rule = Pairs(
            row_ids=of_docs,
            column_ids=column_ids if excluded else columns,
            column_bias=pairs.column_bias,
        )
        if guide is not None:
            rule = replace(rule, guide=guided(guide[1][own], batch.gather_columns(guide[1])))
        found.append(Part(documents, candidates, rule, batch))
    if further.references is not None:
        found.append(Part(anchors, further.references.detach(), Pairs()))
    return found


def own_scores(further, anchors, backend, similarity):
    """(N, K) scores of the anchors with negatives of their own."""
    dtype = compute_dtype(anchors)

    def of(rows, negatives, _):
        rows, negatives = rows.to(dtype), negatives.to(dtype)
        if similarity == "cosine":
            rows = unit_rows(rows, backend)
            negatives = unit_rows(negatives.flatten(0, 1), backend).view(negatives.shape)
        return (negatives * rows[:, None]).sum(2)

    return by_bands(of, anchors, further.own_negatives)


def dense(parts, temperature, similarity, backend):
    """[(N, R) logits] of the parts, -inf where a pair takes no part."""
    found = []
    for part in parts:
        gather = (lambda t: t) if part.batch is None else part.batch.gather_columns
        scores = dense_scores(part.rows, gather(part.columns), backend, similarity)
        kept = pair_mask(part.pairs, *scores.shape, scores.device)
        logits = scores / temperature
        if part.pairs.column_bias is not None:
            logits = logits + part.pairs.column_bias
        found.append(logits.masked_fill(~kept, -torch.inf))
    return found


def log_sum(part, scale, positive, similarity, backend):
    """(N,) log-sum-exps of the logits of a part, in the type of sums; positive: the logits of its
    positives.
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

    found = tile_loss(
        Tile("softmax", part.pairs, cosine=similarity == "cosine"),
        part.rows,
        part.columns,
        scale=scale,
        batch=part.batch,
        formula=formula,
        backend=backend,
        measured=False,
    )
    return widened(found) + positive if targeted else found


def guide_of(guide, margin, strategy, own, x, batch, backend):
    """The `Guide` of anchors with the candidates of all ranks: thresholds t_i - margin, where t_i
    is the guide's cosine of the row's positive, or t_i - |t_i| margin.
    """
    if guide is None:
        return None
    rows, columns = guide_beside(x, *guide)
    if len(rows):
        cosines = guide_cosines(rows, columns[own], backend=backend.name)
    else:  # of a rank without rows
        cosines = rows.new_zeros(0, dtype=compute_dtype(rows))
    columns = batch.gather_columns(columns)
    thresholds = _thresholds(cosines, margin, strategy)
    return as_guide((rows, columns, thresholds), len(rows), len(columns), x)


def _thresholds(cosines, margin, strategy):
    """What a guide's cosines may not be above, from those of the positives."""
    return cosines - (cosines.abs() if strategy == "relative" else 1.0) * margin


def positive_logits(anchors, candidates, own, scale, similarity, backend):
    """(N,) logits of the positives, in the type of sums."""
    dtype = compute_dtype(anchors)

    def scores(rows, columns, _):
        return paired_scores(rows.to(dtype), columns.to(dtype), backend, similarity)

    return scale * widened(by_bands(scores, anchors, candidates, index=own))


def dense_guide(guide, margin, strategy, positives, scores):
    """`guide_of` for the dense specification: scores (N, M)."""
    if guide is None:
        return None
    rows, columns = guide_beside(scores, *guide)
    cosines = guide_cosines(rows, columns[positives], backend="eager")
    thresholds = _thresholds(cosines, margin, strategy)
    return as_guide((rows, columns, thresholds), *scores.shape, scores)


def check_guide(guide, anchors, candidates):
    """TypeError or ValueError for a guide that does not fit."""
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
    """(N,) by how much a positive's score is above the mean of the candidates of all ranks.

    A product with the difference of two rows, so it is exactly 0 where there is one candidate.
    """
    dtype, wide = compute_dtype(anchors), wide_dtype(anchors.device)

    def scored(rows):
        rows = rows.to(dtype)
        return unit_rows(rows, backend) if similarity == "cosine" else rows

    def total_of(columns, *_):
        return scored(columns).sum(0, dtype=wide)

    def above(rows, columns, mean):
        return (scored(rows) * (scored(columns) - mean)).sum(1)

    total = batch.total_with_gradient(by_bands(total_of, candidates, summed=True))
    return by_bands(above, anchors, candidates, (total / batch.columns).to(dtype), index=own)

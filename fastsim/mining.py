"""Hard negatives for pairs of embeddings, from `top_k` instead of an N x M matrix.

Source of the margins: Moreira et al. 2024, "NV-Retriever: Improving text embedding models with
effective hard-negative mining", section 3.2: a negative nearly as close as the positive is often an
unlabelled positive. Their TopK-MarginPos is `margin`, their TopK-PercPos is `relative_margin`, with
0.05 for their 95 %.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.checks import (
    SIMILARITIES,
    check_choice,
    check_flags,
    check_integers,
    check_number,
    check_sides,
    float_of,
    int_of,
)
from fastsim.dot_products import as_cosines
from fastsim.pairs import as_ids
from fastsim.scores import paired_cosine_similarity, top_k
from fastsim.ties import highest_equal

_QUERIES = 8192  # queries searched at once, so that memory does not grow with N x depth


def mine_hard_negatives(
    queries: Tensor,
    corpus: Tensor,
    positives: Tensor | None = None,
    *,
    count: int = 1,
    ranks: tuple[int, int] = (1, 30),
    margin: float | None = None,
    relative_margin: float | None = None,
    score_range: tuple[float, float] | None = None,
    similarity: str = "cosine",
    query_ids: Tensor | None = None,
    corpus_ids: Tensor | None = None,
    sample: bool = False,
    seed: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the hardest negatives of each query within limits, as rows of the corpus.

    Args:
        queries: (N, D).
        corpus: (M, D), M >= N without `positives`.
        positives: (N,) integers, the corpus row of each query's positive; None: `arange(N)`. Or
            (N, P): that row first, then further rows that are no negatives, padded with -1.
        count: the number of negatives per query.
        ranks: (first, last), the allowed ranks, counted from 1 among the neighbours that are no
            positives. The first few are often unlabelled positives.
        margin: the score of a negative is at most p - margin, for p the score of the positive.
        relative_margin: the score of a negative is at most p - relative_margin |p|; NV-Retriever's
            95 % is 0.05.
        score_range: (low, high), the allowed scores of a negative, ends included; None: any score.
        similarity: "cosine" or "dot", what the scores are: margins and `score_range` are in its
            unit.
        query_ids, corpus_ids: (N,) and (M,) integers, equal for equal texts. A corpus row is no
            negative of a query if it has the id of the query or of one of its `positives`. At most
            1,000 rows per query are skipped by id, so a query with more may get fewer negatives.
        sample: whether to draw at random from the ranks, instead of taking the hardest.
        seed: an int, the seed of the draw.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        (rows, scores), (N, count) each, the hardest first: the rows int64, -1 if there are fewer;
        their scores with the dtype of `cosine_similarity`, -inf there. Not differentiable.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

    Example:
        >>> queries, corpus = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> rows, scores = fastsim.mine_hard_negatives(queries, corpus)
        >>> rows
        tensor([[2],
                [2]])
    """
    check_sides("corpus", corpus, "queries", queries)
    rows, columns = queries.shape[0], corpus.shape[0]
    for name, value in (("margin", margin), ("relative_margin", relative_margin)):
        if value is not None:
            check_number(name, value, tensor=False)
    check_flags(sample=sample)
    check_choice("similarity", similarity, SIMILARITIES)
    count, seed = int_of("count", count, 1), _seed(seed)
    first, last = _ranks(ranks, count)
    # Ranks beyond the corpus are equivalent; clamped, they fit an int64.
    ranks = min(first, columns + 1), min(last, columns)
    limits = _Limits(*ranks, *_score_range(score_range), margin, relative_margin)
    if positives is None:
        if columns < rows:
            raise ValueError(
                f"corpus: wanted at least {rows} rows, one per query where `positives` is None,"
                f" got {columns}"
            )
        positives = torch.arange(rows, device=queries.device)
    named = _positives(positives, rows, columns, queries.device)
    query_ids, corpus_ids = _ids(query_ids, corpus_ids, rows, columns, queries.device)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    mined = torch.full((rows, count), -1, dtype=torch.int64, device=queries.device)
    scores = None
    with torch.no_grad():
        queries, corpus, factors = as_cosines(queries, corpus, similarity)
    room = named.shape[1] + _room(query_ids, corpus_ids, named)
    depth = min(limits.last + room, columns)
    for start in range(0, rows, _QUERIES):
        part = slice(start, min(start + _QUERIES, rows))
        values, near = top_k(queries[part], corpus, depth, backend=backend)
        if scores is None:
            scores = values.new_full((rows, count), -torch.inf)
        if not bool(values.isfinite().all()):
            raise ValueError("queries, corpus: wanted finite embeddings, got NaN or infinity")
        with torch.no_grad():
            positive = paired_cosine_similarity(queries[part], corpus[named[part, 0]])[:, None]
        # Rounding may take cosines beyond 1.
        values, positive = (
            cosines.clamp(-1.0, 1.0) * factors[part] for cosines in (values, positive)
        )
        own_ids = None if query_ids is None else query_ids[part, None]
        allowed = _unnamed(near, named[part], own_ids, corpus_ids)
        limits.apply(allowed, values, positive, factors[part])
        mined[part], scores[part] = _choose(allowed, values, near, count, sample, generator)
    return mined, queries.new_empty(0, count) if scores is None else scores


class _Limits(NamedTuple):
    """The limits of ranks and scores within which a neighbour may be a negative."""

    first: int
    last: int
    low: float
    high: float
    margin: float | None
    relative_margin: float | None

    def apply(self, allowed, scores, positive, factors):
        """Sets `allowed` (N, K) to False for neighbours outside the limits.

        scores: (N, K), descending in each row. positive: (N, 1) the score of the positive.
        factors: (N, 1) what cosines were multiplied by to become these scores.
        """
        rank = allowed.cumsum(1)
        allowed &= (rank >= self.first) & (rank <= self.last)
        allowed &= (scores >= self.low) & (scores <= self.high)
        if self.margin is not None:
            allowed &= scores <= highest_equal(positive - self.margin, factors)
        if self.relative_margin is not None:
            highest = positive - self.relative_margin * positive.abs()
            allowed &= scores <= highest_equal(highest, factors)


def _unnamed(near, named, query_ids, corpus_ids):
    """Whether each row of `near` (N, K) may be a negative by its number and id: (N, K) booleans.

    named: (N, P), the rows that may not. query_ids: (N, 1), or None without ids.
    """
    allowed = torch.ones_like(near, dtype=torch.bool)
    if query_ids is not None:
        ids = corpus_ids[near]
        allowed &= ids != query_ids
    for row in named.T[..., None]:
        allowed &= near != row
        if query_ids is not None:
            allowed &= (ids != corpus_ids[row.clamp(min=0)]) | (row < 0)
    return allowed


def _ids(query_ids, corpus_ids, rows, columns, device):
    """Checks the ids and returns them as int64; (None, None) without."""
    if (query_ids is None) != (corpus_ids is None):
        only = "corpus_ids" if query_ids is None else "query_ids"
        raise ValueError(f"query_ids, corpus_ids: wanted both or neither, got {only} alone")
    if query_ids is None:
        return None, None
    check_integers("query_ids", query_ids, rows, device)
    check_integers("corpus_ids", corpus_ids, columns, device)
    return as_ids(query_ids), as_ids(corpus_ids)


def _positives(positives, rows, columns, device):
    """Checks `positives` and returns them as (N, P) int64."""
    shape = positives.shape if isinstance(positives, Tensor) else (rows,)
    if len(shape) not in (1, 2) or shape[1:] == (0,):
        raise ValueError(
            f"positives: wanted shape (N,), or (N, P) with P of at least 1, got {tuple(shape)}"
        )
    several = len(shape) == 2
    own = positives[:, 0] if several else positives
    check_integers("positives", own, rows, device)
    further = as_ids(positives[:, 1:]) if several else own.new_empty(rows, 0, dtype=torch.int64)
    own = as_ids(own)
    for numbers, first, none in ((own, 0, ""), (further, -1, ", or -1 for none")):
        low, high = numbers.aminmax() if numbers.numel() else (first, first)
        if low < first or high >= columns:
            raise ValueError(
                f"positives: wanted rows of the corpus, 0 to {columns - 1}{none},"
                f" got {int(low)} to {int(high)}"
            )
    return torch.cat([own[:, None], further], 1)


def _room(query_ids, corpus_ids, named):
    """The largest number of neighbours that the ids leave out for one query, at most 1000.

    named: (N, P) rows of the corpus, the positives of each query, -1 for none.
    """
    if corpus_ids is None or len(corpus_ids) == 0:
        return 0
    values, counts = corpus_ids.unique(return_counts=True)
    some = torch.cat([torch.ones_like(query_ids[:, None], dtype=torch.bool), named >= 0], 1)
    ids = torch.cat([query_ids[:, None], corpus_ids[named.clamp(min=0)]], 1)
    place = torch.searchsorted(values, ids).clamp(max=len(values) - 1)
    most = torch.where((values[place] == ids) & some, counts[place], 0).sum(1)
    # At most 1000: one very frequent text would deepen the search for every query.
    return min(int(most.max()) if len(named) else 0, 1000)


def _choose(allowed, values, near, count, sample, generator):
    """(rows, scores), (N, count) each: the first allowed neighbours (N, depth), or a sample."""
    order = torch.arange(values.shape[1], dtype=torch.float32, device=values.device)
    if sample:
        order = torch.rand(values.shape, generator=generator, dtype=torch.float32, device="cpu").to(
            values.device
        )
    order = order.expand(values.shape).masked_fill(~allowed, torch.inf)
    width = min(count, values.shape[1])
    place = order.topk(width, dim=1, largest=False).indices
    place = place.sort(dim=1).values  # the hardest first, in a sample too
    kept = allowed.gather(1, place)
    rows = near.gather(1, place).masked_fill(~kept, -1)
    scores = values.gather(1, place).masked_fill(~kept, -torch.inf)
    # Move the missing entries to the end.
    front = kept.long().argsort(dim=1, descending=True, stable=True)
    rows, scores = rows.gather(1, front), scores.gather(1, front)
    missing = (0, count - width)
    pad = torch.nn.functional.pad
    return pad(rows, missing, value=-1), pad(scores, missing, value=-torch.inf)


def _seed(seed):
    seed = int_of("seed", seed)
    if not -(2**63) <= seed < 2**64:  # the range of a generator of torch
        raise ValueError(f"seed: wanted -2**63 to 2**64 - 1, got {seed}")
    return seed


def _ranks(ranks, count):
    """(first, last) as ints, with at least `count` ranks."""
    try:
        first, last = (int_of("ranks", rank) for rank in ranks)
    except (TypeError, ValueError):
        raise TypeError(f"ranks: wanted two ints, (first, last), got {ranks!r}") from None
    if not 1 <= first <= last or last - first + 1 < count:
        raise ValueError(
            f"ranks: wanted 1 <= first <= last with room for {count} negatives, got {ranks}"
        )
    return first, last


def _score_range(score_range):
    """(low, high) as floats; None: without bounds."""
    if score_range is None:
        return -math.inf, math.inf
    try:
        low, high = (float_of("score_range", end) for end in score_range)
    except (TypeError, ValueError):
        raise TypeError(f"score_range: wanted numbers (low, high), got {score_range!r}") from None
    if not low <= high:
        raise ValueError(f"score_range: wanted (low, high) with low <= high, got {score_range}")
    return low, high

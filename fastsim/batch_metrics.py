"""What the scores of a batch say of the training: accuracy, similarities, what was excluded.

A loss computes every score once, in panels; within `metrics` the same pass also counts positives
and negatives. No product is made a second time, and no score is kept. The loss is the same: bit for
bit, or but for rounding where without metrics there is a shorter way to it (InfoNCE with further
candidates or label smoothing, rows against themselves).
`metrics` is a context rather than an argument, so no loss has a parameter for it, and it reaches
losses that other code calls: `GradCache`, a wrapped model, a trainer.
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from fastsim.precision import wide_dtype, widened

# Of each row, over the columns: two maxima, EMPTY of no scores, then sums.
SEEN = (
    "highest_negative",
    "highest_positive",
    "negative_sum",
    "negatives",
    "positive_sum",
    "positives",
    "excluded_by_id",
    "excluded_by_score",
)
MAXIMA = 2
EMPTY = -1e30  # as fastsim.kinds.kind.EMPTY

# What is added up over rows, ranks and batches.
TOTALS = (
    "rows",
    "hits",
    "rows_with_positive",
    "hardest_sum",
    "rows_with_negative",
    *SEEN[MAXIMA:],
    "squared_distances",
    "distances",
    "row_potential",
    "row_potentials",
    "column_potential",
    "column_potentials",
)
SHARPNESS = 2.0  # t of the Gaussian potential exp(-t |x - y|^2)


def _places(*names):
    return [(name, *map(TOTALS.index, of)) for name, *of in names]


# Name, and the places in the totals of what is divided and by what: to read is part of a small
# batch's time.
_MEANS = _places(
    ("accuracy", "hits", "rows_with_positive"),
    ("positive", "positive_sum", "positives"),
    ("negative", "negative_sum", "negatives"),
    ("hardest_negative", "hardest_sum", "rows_with_negative"),
    ("excluded_by_id", "excluded_by_id", "rows"),
    ("excluded_by_score", "excluded_by_score", "rows"),
    ("alignment", "squared_distances", "distances"),
)
_POTENTIALS = _places(
    ("rows", "row_potential", "row_potentials"),
    ("columns", "column_potential", "column_potentials"),
)


class _Watchers(threading.local):
    """Of each thread. A name that the class has is found sooner than one that is missing."""

    open: tuple = ()  # the `Metrics` of the blocks that the thread is in


_watchers = _Watchers()


class Metrics:
    """What losses have seen within a `metrics` block, added up over their calls."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, total: Tensor) -> None:
        """Adds the totals of one call of a loss, (len(TOTALS),); losses call it."""
        if self._total is not None:
            total = total + self._total.to(total.device)
        self._total = total

    def clear(self) -> None:
        """Forgets everything."""
        self._total = None

    def read(self) -> dict[str, float]:
        """The numbers of all calls so far, without those about which nothing was seen.

        A GPU is waited for here, and nowhere else. Every number is a mean over the rows or pairs of
        all calls together:

        accuracy: among the rows that have a positive, the share in which some positive has a higher
            score than every negative. A tie is a miss.
        positive, negative: mean score of the positive pairs and of the negative pairs.
        hardest_negative: mean over the rows of the highest score of a negative.
        excluded_by_id: mean number of candidates of a row that `exclude` leaves out.
        excluded_by_score: the same for `exclude_above` or a guide.
        alignment: mean of |x - y|^2 = 2 - 2 cos over the positive pairs.
        uniformity: log of the mean of exp(-2 |x - y|^2) over pairs of rows of one side, the mean of
            both sides. The loss does not compare the rows of a side with each other, which would
            cost another product. So the pairs are row i with row i + N // 2: N // 2 of the
            N (N - 1) / 2 pairs, an unbiased sample where the order of the rows is random.

        Alignment and uniformity are left out for losses over dot products.
        Source: Wang and Isola 2020, "Understanding Contrastive Representation Learning through
        Alignment and Uniformity on the Hypersphere", section 4.1, alpha = 2 and t = 2.
        """
        if self._total is None:
            return {}
        of = self._total.tolist()
        found = {name: of[total] / of[count] for name, total, count in _MEANS if of[count]}
        # At least exp(-8): no pair is farther apart than 2.
        sides = [math.log(of[total] / of[count]) for _, total, count in _POTENTIALS if of[count]]
        if sides:
            found["uniformity"] = sum(sides) / len(sides)
        return found


@contextlib.contextmanager
def metrics(seen: Metrics | None = None) -> Iterator[Metrics]:
    """Within the block, losses over all pairs of a batch also record metrics of it.

    A positive pair is one whose target is above 0: the anchor's positive, the same group, or a
    target matrix's entry. Several losses, or several steps, add up until `Metrics.clear`. Blocks
    can be nested; each sees what happens within it. A block holds for its own thread.

    With `group=` every rank has to be in a block, and reads the numbers of all ranks together.
    Drop-ins that gather embeddings themselves (open_clip, sentence-transformers) count their own
    rows. With `GradCache` the block is around its `backward`, which calls the loss once; under
    DistributedDataParallel there is nothing to do.

    Not seen are losses on distances, on lists of scores and on sets of tokens; `distill`;
    `batch_semi_hard_triplet` and `batch_all_triplet`; `hardest_pairs`, `mean_negative` and
    `closest_negative`; the further candidates of `info_nce`; and `cosent_matrix` where it sorts its
    entries (more than 256 levels).

    Args:
        seen: the `Metrics` to add to; None: a new one.

    Returns:
        A context whose value is the `Metrics`; `Metrics.read` says what each number is.

    Raises:
        RuntimeError: by a loss in the block, where the named backend records no metrics (cpu and
            torch do), or where torch.compile traces the loss with fullgraph=True; without
            fullgraph the loss runs uncompiled.

    Example:
        >>> rows = torch.eye(3)
        >>> with fastsim.metrics() as seen:
        ...     loss = fastsim.info_nce(rows, rows)
        >>> seen.read()["accuracy"], seen.read()["hardest_negative"]
        (1.0, 0.0)
    """
    seen = Metrics() if seen is None else seen
    before = _watchers.open
    _watchers.open = (*before, seen)
    try:
        yield seen
    finally:
        _watchers.open = before


def watched():
    """Whether this thread is in a `metrics` block."""
    return bool(_watchers.open)


def nothing_seen(rows, device):
    """The numbers (N, len(SEEN)) of rows of which no score has been looked at."""
    seen = torch.zeros(rows, len(SEEN), dtype=wide_dtype(device), device=device)
    seen[:, :MAXIMA] = EMPTY
    return seen


def not_compiled():
    """RuntimeError while torch.compile traces a watched loss."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "metrics: wanted a loss that is not compiled, got one inside torch.compile;"
            " leave the block or the compiled function's fullgraph=True"
        )


def no_totals(device):
    """Memory for the totals of one call of a loss, (len(TOTALS),)."""
    return torch.empty(len(TOTALS), dtype=wide_dtype(device), device=device)


def record_totals(total):
    """Adds the totals of one call to the blocks that it was made in."""
    for watcher in _watchers.open:
        watcher.add(total)


@torch.no_grad()
def record(seen, x, y, *, cosine, batch, backend):
    """Adds the numbers of a loss's rows to the blocks that it was called in.

    seen (N, len(SEEN)). x (N, D), y (M, D) or None: its embeddings, this rank's own. batch: a
    `Batch` over whose ranks everything is added up, or None.
    """
    sides = (x, y) if cosine else (None, None)
    total = backend.batch_totals(seen, *(t if t is None else t.detach() for t in sides))
    if batch is not None:
        total = batch.total(total)
    record_totals(total)


def totals(seen, x, y, paired_cosines):
    """`Backend.batch_totals` in torch's operators."""
    of = dict(zip(SEEN, seen.unbind(1), strict=True))
    some, other = of["positives"] > 0, of["negatives"] > 0
    hits = some & (of["highest_positive"] > of["highest_negative"])
    hardest = torch.where(other, of["highest_negative"], 0.0)
    sums = {name: of[name].sum() for name in SEEN[MAXIMA:]}
    zero, cosine = seen.new_zeros(()), x is not None
    sums |= {
        "rows": zero + len(seen),
        "hits": hits.sum(),
        "rows_with_positive": some.sum(),
        "hardest_sum": hardest.sum(),
        "rows_with_negative": other.sum(),
        "squared_distances": 2 * (sums["positives"] - sums["positive_sum"]) if cosine else zero,
        "distances": sums["positives"] if cosine else zero,
    }
    for side, rows in (("row", x), ("column", y)):
        half = 0 if rows is None else rows.shape[0] // 2
        potential = _potential(rows, half, paired_cosines) if half else zero
        sums |= {f"{side}_potential": potential, f"{side}_potentials": zero + half}
    return torch.stack([sums[name].to(seen.dtype) for name in TOTALS])


def _potential(rows, half, paired_cosines):
    """sum_i exp(-t |u_i - u_{i + half}|^2) over the first `half` unit rows."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    one, other = rows.detach()[:half].to(dtype), rows.detach()[half : 2 * half].to(dtype)
    cosines = widened(paired_cosines(one, other)[0])
    return (2 * SHARPNESS * (cosines - 1)).exp().sum()

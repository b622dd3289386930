"""Metrics of the scores of a batch: accuracy, similarities, numbers of excluded pairs.

A loss computes every score once, in panels; within a `metrics` block the same pass also counts
positives and negatives. No product is computed twice, and no score is kept. The loss stays the same
bit for bit, or to rounding if a faster way exists without metrics (InfoNCE with further candidates
or label smoothing, x compared with itself).

`metrics` is a context instead of an argument, so that it reaches losses that other code calls:
`GradCache`, a wrapped model, a trainer.
"""

import contextlib
import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from fastsim.precision import compute_dtype, wide_dtype, widened

# The row metrics: two maxima over the columns, EMPTY without a score, then sums over the columns.
ROW_METRICS = (
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

# Sums over rows, ranks and batches, from which `Metrics.read` computes means.
TOTALS = (
    "rows",
    "hits",
    "rows_with_positive",
    "hardest_sum",
    "rows_with_negative",
    *ROW_METRICS[MAXIMA:],
    "squared_distances",
    "distances",
    "row_potential",
    "row_potentials",
    "column_potential",
    "column_potentials",
)
SHARPNESS = 2.0  # t of the Gaussian potential exp(-t |x - y|^2)


def _places(*means):
    return [(name, *map(TOTALS.index, totals)) for name, *totals in means]


# (name, place of the sum, place of the count) in the totals. The places are looked up only once,
# because `read` takes part of the time of a small batch.
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


class _Blocks(threading.local):
    """The open `metrics` blocks of each thread."""

    # The `Metrics` of the blocks, the innermost last. A default on the class is found faster than
    # a missing attribute.
    open: tuple = ()


_blocks = _Blocks()


class Metrics:
    """Metrics of the losses called within a `metrics` block, added up over their calls."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, total: Tensor) -> None:
        """Adds the totals (len(TOTALS),) of one call of a loss; losses call it."""
        if self._total is not None:
            total = total + self._total.to(total.device)
        self._total = total

    def clear(self) -> None:
        """Forgets all calls."""
        self._total = None

    def read(self) -> dict[str, float]:
        """The metrics of all calls so far; those with nothing to average over are left out.

        This waits for the GPU; nothing else here does. Each number is a mean over the rows or pairs
        of all calls together:

        accuracy: among the rows that have a positive, the share in which some positive has a higher
            score than every negative. A tie is a miss.
        positive, negative: mean score of the positive pairs and of the negative pairs.
        hardest_negative: mean over the rows of the highest score of a negative.
        excluded_by_id: mean number of candidates of a row that `exclude` leaves out.
        excluded_by_score: the same for `exclude_above` or a guide.
        alignment: mean of |x - y|^2 = 2 - 2 cos over the positive pairs.
        uniformity: log of the mean of exp(-2 |x - y|^2) over pairs of rows of one side, averaged
            over both sides. The pairs are row i with row i + N // 2: comparing all rows of a side
            with each other would cost another matrix product. These N // 2 of the N (N - 1) / 2
            pairs are an unbiased sample if the order of the rows is random.

        Alignment and uniformity are left out for losses over dot products.
        Source: Wang and Isola 2020, "Understanding Contrastive Representation Learning through
        Alignment and Uniformity on the Hypersphere", section 4.1, alpha = 2 and t = 2.
        """
        if self._total is None:
            return {}
        totals = self._total.tolist()
        means = {
            name: totals[total] / totals[count] for name, total, count in _MEANS if totals[count]
        }
        potentials = [
            totals[total] / totals[count] for _, total, count in _POTENTIALS if totals[count]
        ]
        if potentials:
            # No log of 0: no pair is farther apart than 2, so a potential is at least exp(-8).
            means["uniformity"] = sum(map(math.log, potentials)) / len(potentials)
        return means


@contextlib.contextmanager
def metrics(seen: Metrics | None = None) -> Iterator[Metrics]:
    """Within the block, losses over all pairs of a batch also record metrics of the batch.

    A pair is positive if its target is above 0: the anchor's positive, the same group, or an entry
    of a target matrix. Several losses or steps add up until `Metrics.clear`. Blocks can be nested;
    each records the losses within it. A block holds for its own thread.

    With `group=` every rank has to be in a block; it reads the metrics of all ranks together.
    Drop-ins that gather embeddings themselves (open_clip, sentence-transformers) count the rows of
    their rank. Put the block around `GradCache.backward`, which calls the loss once.
    DistributedDataParallel needs nothing further.

    Not recorded: losses over distances, lists of scores or sets of tokens; `distill`;
    `batch_semi_hard_triplet` and `batch_all_triplet`; `hardest_pairs`, `mean_negative` and
    `closest_negative`; the further candidates of `info_nce`; and `cosent_matrix` if it sorts its
    entries (more than 256 levels).

    Args:
        seen: the `Metrics` to add to; None: a new one.

    Returns:
        A context whose value is the `Metrics`; `Metrics.read` explains each number.

    Raises:
        RuntimeError: by a loss in the block, if the named backend records no metrics (cpu and
            torch do), or if torch.compile traces the loss with fullgraph=True; without fullgraph
            the loss runs uncompiled.

    Example:
        >>> rows = torch.eye(3)
        >>> with fastsim.metrics() as seen:
        ...     loss = fastsim.info_nce(rows, rows)
        >>> seen.read()["accuracy"], seen.read()["hardest_negative"]
        (1.0, 0.0)
    """
    seen = Metrics() if seen is None else seen
    before = _blocks.open
    _blocks.open = (*before, seen)
    try:
        yield seen
    finally:
        _blocks.open = before


def in_metrics():
    """Whether this thread is within a `metrics` block."""
    return bool(_blocks.open)


def empty_row_metrics(rows, device):
    """The row metrics (rows, len(ROW_METRICS)) before the first score."""
    row_metrics = torch.zeros(rows, len(ROW_METRICS), dtype=wide_dtype(device), device=device)
    row_metrics[:, :MAXIMA] = EMPTY
    return row_metrics


def not_compiled():
    """Raises a RuntimeError while torch.compile traces a loss within a `metrics` block."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "metrics: wanted a loss that is not compiled, got one inside torch.compile;"
            " leave the block or the compiled function's fullgraph=True"
        )


def empty_totals(device):
    """Memory for the totals (len(TOTALS),) of one call of a loss."""
    return torch.empty(len(TOTALS), dtype=wide_dtype(device), device=device)


def record_totals(total):
    """Adds the totals of one call of a loss to the `metrics` blocks around it."""
    for block in _blocks.open:
        block.add(total)


@torch.no_grad()
def record(row_metrics, x, y, *, cosine, batch, backend):
    """Adds the row metrics of one call of a loss to the `metrics` blocks around it.

    row_metrics: (N, len(ROW_METRICS)).
    x, y: the embeddings of this rank, (N, D) and (M, D) or None.
    batch: the `Batch` over whose ranks to sum, or None.
    """
    sides = (x, y) if cosine else (None, None)
    total = backend.batch_totals(row_metrics, *(t if t is None else t.detach() for t in sides))
    if batch is not None:
        total = batch.total(total)
    record_totals(total)


def totals(row_metrics, x, y, paired_cosines):
    """`Backend.batch_totals` in plain torch."""
    metric = dict(zip(ROW_METRICS, row_metrics.unbind(1), strict=True))
    with_positive, with_negative = metric["positives"] > 0, metric["negatives"] > 0
    hits = with_positive & (metric["highest_positive"] > metric["highest_negative"])
    hardest = torch.where(with_negative, metric["highest_negative"], 0.0)
    sums = {name: metric[name].sum() for name in ROW_METRICS[MAXIMA:]}
    zero, cosine = row_metrics.new_zeros(()), x is not None
    sums |= {
        "rows": zero + len(row_metrics),
        "hits": hits.sum(),
        "rows_with_positive": with_positive.sum(),
        "hardest_sum": hardest.sum(),
        "rows_with_negative": with_negative.sum(),
        "squared_distances": 2 * (sums["positives"] - sums["positive_sum"]) if cosine else zero,
        "distances": sums["positives"] if cosine else zero,
    }
    for side, rows in (("row", x), ("column", y)):
        half = 0 if rows is None else rows.shape[0] // 2
        potential = _potential(rows, half, paired_cosines) if half else zero
        sums |= {f"{side}_potential": potential, f"{side}_potentials": zero + half}
    return torch.stack([sums[name].to(row_metrics.dtype) for name in TOTALS])


def _potential(rows, half, paired_cosines):
    """sum_i exp(-t |u_i - u_{i + half}|^2) over the first `half` unit rows."""
    dtype = compute_dtype(rows)
    one, other = rows.detach()[:half].to(dtype), rows.detach()[half : 2 * half].to(dtype)
    cosines = widened(paired_cosines(one, other)[0])
    return (2 * SHARPNESS * (cosines - 1)).exp().sum()

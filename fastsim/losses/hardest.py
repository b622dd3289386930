"""The farthest row of the own group and the nearest of any other, the pairs of batch-hard triplets.

    p_i = max_{j != i, group(j) = group(i)} d(i, j),   n_i = min_{group(j) != group(i)} d(i, j)

One pass over the scores, forward only, finds both columns. The distances of these pairs are then
computed from their rows, so that they are as exact as the inputs; the gradient of a row reaches two
others. For Euclidean d, x_j is the nearer to x_i the larger x_i . x_j - |x_j|^2 / 2 is.

Source: that of `batch_hard_triplet`, fastsim/losses/batch_hard_triplet.py.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastsim.annotations import Group
from fastsim.autocast import without_autocast
from fastsim.backends import pick
from fastsim.backends.rows import take_rows
from fastsim.checks import check_choice
from fastsim.distributed import batchwise, join
from fastsim.engine.chosen_rows import partner_distances, partner_products
from fastsim.engine.distances import all_distances
from fastsim.engine.ring import ring_hardest, ring_sum
from fastsim.engine.selection import (
    centred_rows,
    finds_hardest_pairs,
    hardest_columns,
    selected_rows,
)
from fastsim.engine.selection import hardest_pairs as found_pairs
from fastsim.pairs import dense_targets, global_groups, pair_mask, parse_groups
from fastsim.reduce import as_float
from fastsim.scores import paired, unit_rows

DISTANCES = ("euclidean", "cosine")


class HardestPairs(NamedTuple):
    """The hardest positive and negative of each row, all (N,).

    A row without a positive has distance -inf and index -1, one without a negative +inf and -1.
    """

    positive: Tensor
    negative: Tensor
    positive_index: Tensor
    negative_index: Tensor


@batchwise
def hardest_pairs(
    embeddings: Tensor,
    groups: Tensor,
    references: Tensor | None = None,
    reference_groups: Tensor | None = None,
    *,
    own_first: bool = False,
    distance: Literal["euclidean", "cosine"] = "euclidean",
    group: Group = None,
    backend: str | None = None,
) -> HardestPairs:
    """Each row's farthest reference of its own group and nearest of any other.

    The pairs of `batch_hard_triplet`, for a loss of your own.

    Formula and source: fastsim/losses/hardest.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; equal ones are positives of each other.
        references: (M, D), the rows that embeddings are compared with; by default the embeddings
            themselves, without the pairs of a row with itself.
        reference_groups: (M,) integers, together with references.
        own_first: whether the first N references are the embeddings themselves; the pair of row i
            and reference i is then left out.
        distance: "euclidean", or "cosine", which is 1 - cosine.
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`. The rows are then the rank's own, the indices those of the
            references of all ranks, rank after rank.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        `HardestPairs`, its distances differentiable.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot serve them.

    Example:
        >>> embeddings = torch.tensor([[0.0], [1.0], [3.0], [5.0]])
        >>> fastsim.hardest_pairs(embeddings, torch.tensor([0, 0, 1, 1])).negative_index
        tensor([2, 2, 1, 1])
    """
    check_choice("distance", distance, DISTANCES)
    pairs = parse_groups(
        embeddings, groups, references, reference_groups, own_first, empty=group is not None
    )
    tensors = embeddings, groups, references, reference_groups
    chosen = pick(backend, *tensors, kind="hardest", group=group)
    columns = embeddings if references is None else references
    batch = join(
        group,
        "hardest_pairs",
        embeddings,
        columns,
        references=references,
        own_first=own_first,
        distance=distance,
        backend=chosen.name,
    )
    return hardest_in_batch(embeddings, columns, pairs, distance, batch, chosen)


def hardest_in_batch(embeddings, columns, pairs, distance, batch, backend):
    """`HardestPairs` of the rank's embeddings among the columns of all ranks."""
    measure, pairs = _MEASURES[distance], global_groups(pairs, batch)
    if not batch.ring:
        columns = batch.gather_columns(columns)
    x = measure.points(embeddings, backend)
    y = x if columns is embeddings else measure.points(columns, backend)
    if backend.name == "eager":
        return hardest_of_distances(measure.all_distances(x, y), pairs)
    if batch.ring:
        return _ring_hardest(x, y, (embeddings, columns), measure, pairs, batch, backend)
    y = None if y is x else y
    *operands, everything = measure.operands(x, y, (embeddings, columns), backend)
    indices = hardest_columns(*operands, pairs, backend)
    distances = measure.chosen_rows(x, y, torch.stack(indices), (-torch.inf, torch.inf), backend)
    return _found(distances, indices, everything)


def serves_at_once(x, distance, backend):
    """Whether one call of the backend finds the pairs of rows that are held against themselves."""
    return distance == "euclidean" and finds_hardest_pairs(x, backend)


def hardest_at_once(x, groups, backend):
    """`HardestPairs` of rows against themselves, in one call of the backend."""
    indices, distances, everything = found_pairs(x, groups, backend)
    nothing = -torch.inf, torch.inf
    distances = partner_distances(x, None, indices, nothing, backend, known=distances)
    return _found(distances, indices.unbind(0), everything)


def _ring_hardest(x, y, of, measure, pairs, batch, backend):
    """The same where the rank's own columns travel."""
    indices = ring_hardest(x, y, of, measure, pairs, batch, backend)

    def of_block(x, y, columns):
        parts = []
        for index in indices:
            within = index - columns.start
            here = (within >= 0) & (within < len(y))
            distances = measure.distances(x, take_rows(y, within.clamp(0, len(y) - 1)))
            parts.append(torch.where(here, distances, 0.0))
        return parts

    everything = sum((0 * side.detach()).sum() for side in (x, y))
    positive, negative = ring_sum(of_block, x, y, batch)
    positive = torch.where(indices[0] >= 0, positive, -torch.inf)
    negative = torch.where(indices[1] >= 0, negative, torch.inf)
    return _found(torch.stack([positive, negative]), indices, batch.total(everything))


def _found(distances, indices, everything):
    """`HardestPairs` of distances (2, N), with ±inf where there is none, and their indices.

    everything: a number () that is finite where all are: no other is ever the hardest, but it has
    to show.
    """
    return HardestPairs(*(distances + 0 * everything).unbind(0), *indices)


def hardest_of_distances(distances, pairs):
    part = pair_mask(pairs, *distances.shape, distances.device)
    own = dense_targets(pairs, *distances.shape, torch.bool, distances.device)
    none = 0 * distances.sum(1)  # a NaN or Inf reaches its row
    positive, positive_index = distances.masked_fill(~(part & own), -torch.inf).max(1)
    negative, negative_index = distances.masked_fill(~part | own, torch.inf).min(1)
    return HardestPairs(
        positive + none,
        negative + none,
        torch.where((part & own).any(1), positive_index, -1),
        torch.where((part & ~own).any(1), negative_index, -1),
    )


# ---- the two distances ----


class _Euclidean:
    @staticmethod
    def points(x, backend):
        return as_float(x)

    @staticmethod
    def distances(x, y):
        # The norm of torch has gradient 0 at 0, where a square root has infinity.
        return torch.linalg.vector_norm(x - y, dim=-1)

    @staticmethod
    def all_distances(x, y):
        return all_distances(x, y)

    chosen_rows = staticmethod(partner_distances)

    @staticmethod
    def operands(x, y, of, backend):
        """What `hardest_columns` takes, (rows, columns or None, offsets, dtype of the operands),
        and a number () that is finite where all are. of: the embeddings of the points x and y.
        """
        rows, columns, offsets, largest = centred_rows(x, y, backend)
        return rows, columns, offsets, torch.float32, largest


class _Cosine:
    points = staticmethod(unit_rows)

    @staticmethod
    def distances(x, y):
        return 1 - paired(x, y)

    @staticmethod
    def all_distances(x, y):
        with without_autocast(x.device.type):
            return 1 - x @ y.T

    @staticmethod
    def chosen_rows(x, y, columns, missing, backend):
        return 1 - partner_products(x, y, columns, [1 - value for value in missing], backend)

    @staticmethod
    def operands(x, y, of, backend):
        """As for Euclidean, nothing to be taken from the scores."""
        rows = selected_rows(of[0], x, backend)
        columns = None if y is None else selected_rows(of[1], y, backend)
        everything = x.detach().sum() if y is None else x.detach().sum() + y.detach().sum()
        return rows, columns, None, of[0].dtype, everything


_MEASURES = {"euclidean": _Euclidean, "cosine": _Cosine}

"""The farthest positive and the nearest negative of each row, the pairs of batch-hard triplets.

    p_i = max_{j != i, group(j) = group(i)} d(i, j),   n_i = min_{group(j) != group(i)} d(i, j)

One forward pass over the scores finds both columns. The distances of these pairs are then computed
from their rows, so they are as exact as the inputs, and the gradient of a row goes to two others.
For Euclidean d the nearest x_j to x_i has the largest x_i . x_j - |x_j|^2 / 2.

Source: see `batch_hard_triplet`, fastsim/losses/batch_hard_triplet.py.
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
    """The distances and indices of each row's hardest positive and negative, all (N,).

    Without a positive the distance is -inf and the index -1, without a negative +inf and -1.
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
    """Finds each row's farthest reference in its group and its nearest reference outside.

    These are the pairs of `batch_hard_triplet`, as a building block for other losses.

    Formula and source: fastsim/losses/hardest.py.

    Args:
        embeddings: (N, D).
        groups: (N,) integers; rows with equal numbers are positives of each other.
        references: (M, D), the rows that embeddings are compared with; None: the embeddings
            themselves, without the pair of a row with itself.
        reference_groups: (M,) integers, the groups of the references.
        own_first: whether the first N references are the embeddings themselves; the pair of row i
            and reference i is then left out.
        distance: "euclidean", or "cosine" for 1 - cosine.
        group: a process group whose ranks each give their part of the batch, or `Ring(group)`; see
            `fastsim.distributed`. The result then has the rows of this rank, and its indices count
            the references of all ranks in the order of the ranks.
        backend: the name of a backend, see `fastsim.backends`; None: the default.

    Returns:
        `HardestPairs`, with differentiable distances.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
        RuntimeError: for a backend that cannot compute it.

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
    """The `HardestPairs` of this rank's embeddings among the columns of all ranks."""
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
    return _hardest(distances, indices, everything)


def serves_at_once(x, distance, backend):
    """Whether one call of the backend can find the pairs for x compared with itself."""
    return distance == "euclidean" and finds_hardest_pairs(x, backend)


def hardest_at_once(x, groups, backend):
    """The `HardestPairs` for x compared with itself, in one call of the backend."""
    indices, distances, everything = found_pairs(x, groups, backend)
    missing = -torch.inf, torch.inf
    distances = partner_distances(x, None, indices, missing, backend, known=distances)
    return _hardest(distances, indices.unbind(0), everything)


def _ring_hardest(x, y, embeddings, measure, pairs, batch, backend):
    """`hardest_in_batch` for a ring; embeddings: the two tensors of which x and y are points."""
    indices = ring_hardest(x, y, embeddings, measure, pairs, batch, backend)

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
    return _hardest(torch.stack([positive, negative]), indices, batch.total(everything))


def _hardest(distances, indices, everything):
    """`HardestPairs` from distances (2, N), -inf and inf if missing, and their indices.

    everything: a number () that is finite if all inputs are. A NaN is never the hardest, so this
        number makes the distances NaN instead.
    """
    return HardestPairs(*(distances + 0 * everything).unbind(0), *indices)


def hardest_of_distances(distances, pairs):
    """The specification: the `HardestPairs` from distances (N, M)."""
    kept = pair_mask(pairs, *distances.shape, distances.device)
    same = dense_targets(pairs, *distances.shape, torch.bool, distances.device)
    zero = 0 * distances.sum(1)  # NaN if a distance of the row is NaN or infinite
    positive, positive_index = distances.masked_fill(~(kept & same), -torch.inf).max(1)
    negative, negative_index = distances.masked_fill(~kept | same, torch.inf).min(1)
    return HardestPairs(
        positive + zero,
        negative + zero,
        torch.where((kept & same).any(1), positive_index, -1),
        torch.where((kept & ~same).any(1), negative_index, -1),
    )


# ---- the two distances ----


class _Euclidean:
    @staticmethod
    def points(x, backend):
        return as_float(x)

    @staticmethod
    def distances(x, y):
        # Not a square root: at 0 its gradient is infinite, that of torch's norm is 0.
        return torch.linalg.vector_norm(x - y, dim=-1)

    @staticmethod
    def all_distances(x, y):
        return all_distances(x, y)

    chosen_rows = staticmethod(partner_distances)

    @staticmethod
    def operands(x, y, embeddings, backend):
        """(rows, columns or None, offsets, dtype of the operands) for `hardest_columns`, and a
        number () that is finite if all inputs are.

        embeddings: the pair of tensors of which x and y are points.
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
    def operands(x, y, embeddings, backend):
        """The same as for Euclidean distances, but scores need no offsets."""
        rows = selected_rows(embeddings[0], x, backend)
        columns = None if y is None else selected_rows(embeddings[1], y, backend)
        everything = x.detach().sum() if y is None else x.detach().sum() + y.detach().sum()
        return rows, columns, None, embeddings[0].dtype, everything


_MEASURES = {"euclidean": _Euclidean, "cosine": _Cosine}

"""Batch-hard triplets: each row against its farthest positive and its nearest negative.

    L_i = relu(max_{p: l_p = l_i, p != i} d_ip - min_{n: l_n != l_i} d_in + margin)
    margin=None: softplus(max d_ip - min d_in)

d is the Euclidean distance or 1 - cosine. A row without a positive has max = 0; a row without a
negative has no triplet and contributes 0.

Source: Hermans et al. 2017, "In Defense of the Triplet Loss for Person Re-Identification",
equation 5, soft margin section 3.2. The two columns of a row are found by one pass each over
products (a Euclidean distance is one: |x - y|^2 = |x|^2 - 2 (x, 1) . (y, -|y|^2 / 2)), and the
gradient touches those two alone. `batch_semi_hard_triplet` and `batch_all_triplet` take more
triplets of the same batch.
"""

import torch

from fastsim.backends import pick
from fastsim.checks import (
    check_choice,
    check_embeddings,
    check_integers,
    check_number,
    check_reduction,
    check_scores,
)
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float, reduce
from fastsim.scores import compute_dtype, paired, unit_rows, without_autocast
from fastsim.selection import closest_column
from fastsim.targets import Pairs

DISTANCES = ("euclidean", "cosine")


def batch_hard_triplet(
    embeddings, labels, *, margin=5.0, distance="euclidean", reduction="mean", backend=None
):
    """Batch-hard triplet loss of embeddings (N, D) with integer labels (N,).

    margin: a number, or None for the soft margin. distance: "euclidean" or "cosine" (1 - cosine).
    At distance 0 the gradient of a Euclidean distance is taken as 0.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit, RuntimeError for a backend that cannot serve them. Source: see the module.
    """
    check_embeddings("embeddings", embeddings)
    check_integers("labels", labels, embeddings.shape[0], embeddings.device)
    check_choice("distance", distance, DISTANCES)
    check_reduction(reduction)
    chosen = pick(backend, embeddings)
    x = places(embeddings, distance, chosen)
    if chosen.name == "eager":
        distances = all_distances(x, x, distance)
        return batch_hard_triplet_from_distances(
            distances, labels, margin=margin, reduction=reduction
        )
    if margin is not None:
        check_number("margin", margin)
    positive, negative = hardest_columns(x, labels, distance, chosen)
    far, near = (_distances_to(x, columns, distance) for columns in (positive, negative))
    far = torch.where(positive >= 0, far, 0.0)
    losses = torch.where(negative >= 0, _hinge(far - near, margin), 0.0)
    return reduce(losses, reduction)


class BatchHardTriplet(LossModule):
    """The module of `batch_hard_triplet`."""

    function = staticmethod(batch_hard_triplet)


def batch_hard_triplet_from_distances(distances, labels, *, margin=5.0, reduction="mean"):
    """The specification of `batch_hard_triplet`: distances (N, N), the rest as there."""
    check_scores("distances", distances)
    check_integers("labels", labels, distances.shape[0], distances.device)
    check_reduction(reduction)
    if margin is not None:
        check_number("margin", margin)
    distances = as_float(distances)
    same = labels[:, None] == labels[None, :]
    other = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    far = distances.masked_fill(~(same & other), 0.0).max(1).values
    near = distances.masked_fill(same, torch.finfo(distances.dtype).max).min(1).values
    losses = torch.where((~same).any(1), _hinge(far - near, margin), 0.0)
    return reduce(losses, reduction)


def places(embeddings, distance, backend):
    """Rows in the compute type between which distances are taken: unit rows, or centred rows."""
    if distance == "cosine":
        return unit_rows(embeddings, backend)
    x = embeddings.to(compute_dtype(embeddings))
    # Distances do not change, and products of centred rows round less.
    return x - x.detach().mean(0)


def all_distances(x, y, distance):
    """Distances (N, M) of `places` x (N, D) and y (M, D)."""
    with without_autocast(x.device.type):
        return 1 - x @ y.T if distance == "cosine" else torch.cdist(x, y)


def hardest_columns(x, labels, distance, backend):
    """Columns (N,) of each row's farthest positive and nearest negative, -1 where it has none."""
    labels = labels.to(torch.int64)
    rows = columns = x.detach()
    if distance == "euclidean":
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        columns = torch.cat([columns, -0.5 * columns.square().sum(1, keepdim=True)], 1)
    same = Pairs(row_groups=labels, column_groups=labels, skip="diagonal")
    different = Pairs(row_ids=labels, column_ids=labels)
    return (
        closest_column(-rows, columns, x.dtype, False, same, backend),
        closest_column(rows, columns, x.dtype, False, different, backend),
    )


def _distances_to(x, columns, distance):
    chosen = x[columns.clamp(min=0)]
    if distance == "cosine":
        return 1 - paired(x, chosen)
    # The norm of torch has gradient 0 at 0, where a square root has infinity.
    return torch.linalg.vector_norm(x - chosen, dim=1)


def _hinge(gap, margin):
    return torch.nn.functional.softplus(gap) if margin is None else torch.relu(gap + margin)

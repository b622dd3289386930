"""Triplet margin loss on Euclidean distances, Sentence-BERT's triplet objective.

    L_i = relu(|a_i - p_i| - |a_i - n_i| + margin)

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3 (margin 1 there); Schroff et al.
2015. At distance 0 the gradient of that distance is taken as 0, not NaN. It needs no scores of
all pairs: `full_triplet` is the one that looks at the whole batch.
"""

import torch

from fastsim.checks import check_alike, check_embeddings, check_number, check_reduction
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import as_float, reduce


def triplet_margin(anchors, positives, negatives, *, margin=1.0, reduction="mean"):
    """Euclidean triplet loss of anchors, positives and negatives, each (N, D), row by row.

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit. Source: see the module.
    """
    check_embeddings("anchors", anchors)
    for name, value in (("positives", positives), ("negatives", negatives)):
        check_embeddings(name, value)
        check_alike(name, value, "anchors", anchors, rows=True)
    check_number("margin", margin)
    check_reduction(reduction)
    gap = _distance(anchors, positives) - _distance(anchors, negatives)
    return reduce(torch.relu(gap + margin), reduction)


class TripletMargin(LossModule):
    """The module of `triplet_margin`."""

    function = staticmethod(triplet_margin)


def _distance(x, y):
    # The norm of torch has gradient 0 at 0, where a square root has infinity.
    return torch.linalg.vector_norm(as_float(x) - as_float(y), dim=1)

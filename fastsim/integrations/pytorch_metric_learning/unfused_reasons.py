"""Why something of pytorch-metric-learning is not fused: each `of_...` returns a reason or None."""

import torch
from pytorch_metric_learning.distances import LpDistance

from fastsim.checks import FLOATING, INTEGRAL, can_be_read
from fastsim.integrations import overrides
from fastsim.integrations.overrides import no_fused_form, replaced
from fastsim.integrations.pytorch_metric_learning.similarities import (
    PRODUCTS,
    is_cosine,
    similarity,
)

_CROSS_ENTROPY = torch.nn.CrossEntropyLoss(reduction="none")
_DISTANCES = *PRODUCTS, LpDistance
_METHODS = ("forward", "compute_mat", "pairwise_distance", "normalize", "maybe_normalize")
_METHODS += ("margin", "smallest_dist", "largest_dist")
_SHIPPED = {(kind, name): getattr(kind, name) for kind in _DISTANCES for name in _METHODS}


class Replacement(overrides.Hooked):
    """Mixed in before a class of pytorch-metric-learning, whose code computes what is not fused."""

    _package = "pytorch-metric-learning"


def of_distance(distance):
    """A distance that is neither cosine nor Euclidean, or as for `of_changes`."""
    if is_cosine(distance) or (type(distance) is LpDistance and distance.p == 2):
        return of_changes(distance)
    return of_changes(distance) or no_fused_form(distance)


def of_changes(distance):
    """A distance that keeps statistics, or of which a method has been replaced."""
    if distance.collect_stats:
        return "the statistics of a distance need its matrix"
    changed = overrides.patched_attribute(distance)
    kind = type(distance)
    if changed is None and kind in _DISTANCES:
        shipped = ((name, _SHIPPED[kind, name]) for name in _METHODS)
        changed = next(
            (name for name, method in shipped if getattr(kind, name) is not method), None
        )
    return None if changed is None else replaced(f"{changed} of the distance")


def of_scores(distance, similarities):
    """A distance that is none of these similarities, or whose power is not 1."""
    if similarity(distance) in similarities and distance.power == 1:
        return of_changes(distance)
    plural = {"cosine": "cosines", "dot": "dot products"}
    fused = " and ".join(plural[kind] for kind in similarities)
    return f"{no_fused_form(distance)} in this loss, only {fused} have one"


def of_order(distance):
    """A power that may change which pair is the hardest.

    A power above 0 keeps the order of Euclidean distances. It does not keep that of cosines, some
    of which are negative.
    """
    if distance.power == 1 or (not is_cosine(distance) and distance.power > 0):
        return None
    return no_fused_form(f"{distance} to the power of {distance.power}")


def of_positive(loss, *names):
    """A number that has to be above 0 and is not; the value of a tensor off the CPU is not read."""
    for name in names:
        value = getattr(loss, name)
        known = not isinstance(value, torch.Tensor) or can_be_read(value)
        if known and not value > 0:
            return no_fused_form(f"a {name} that is not above 0")
    return None


def of_numbers(loss, *names):
    """Parameters that are tensors or anything else but numbers."""
    numbers = all(isinstance(getattr(loss, name), (int, float)) for name in names)
    return None if numbers else "parameters that are not numbers have no fused form"


def of_cross_entropy(loss):
    """Another cross entropy than theirs, such as one with label smoothing."""
    plain = overrides.is_plain(loss.cross_entropy, _CROSS_ENTROPY)
    return None if plain else replaced("cross_entropy")


def are_few(embeddings, ref_emb):
    """Whether there is at most one positive and one negative pair, whose loss is 0 in theirs."""
    return embeddings.shape[0] * ref_emb.shape[0] <= 2


def of_inputs(embeddings, labels, ref_emb, ref_labels):
    """Inputs that fastsim's losses do not take."""
    if labels is None or ref_labels is None:
        return "pairs that are listed have no fused form, only labels have one"
    if not {labels.dtype, ref_labels.dtype} <= set(INTEGRAL):
        return f"labels of {labels.dtype} against {ref_labels.dtype} have no fused form"
    if embeddings.dtype not in FLOATING or ref_emb.dtype != embeddings.dtype:
        return of_dtypes(embeddings, ref_emb)
    if 0 in (*embeddings.shape, *ref_emb.shape):
        return "there are no embeddings"
    return None


def of_dtypes(embeddings, ref_emb):
    """The reason if these dtypes do not fit."""
    return f"embeddings of {embeddings.dtype} against {ref_emb.dtype} have no fused form"

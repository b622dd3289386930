"""Why something of pytorch-metric-learning has no fused form.

Each `of_...` returns a sentence that says why, or None.
"""

import torch
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.reducers import MeanReducer, MultipleReducers, SumReducer

from fastsim.checks import FLOATING, INTEGRAL, can_be_read
from fastsim.integrations import overrides

_CROSS_ENTROPY = torch.nn.CrossEntropyLoss(reduction="none")
_PRODUCTS = CosineSimilarity, DotProductSimilarity
_DISTANCES = *_PRODUCTS, LpDistance
_METHODS = ("forward", "compute_mat", "pairwise_distance", "normalize", "maybe_normalize")
_METHODS += ("margin", "smallest_dist", "largest_dist")
_SHIPPED = {(kind, name): getattr(kind, name) for kind in _DISTANCES for name in _METHODS}


def say_once(module, reason):
    """A warning that their code computes the loss, once for each class and reason."""
    overrides.say_once(module, reason, "pytorch-metric-learning", stacklevel=7)


def of_hooks(module):
    """The reason where a method that their code would call has been replaced."""
    hook = module.replaced_hook()
    return hook and f"{hook} has been replaced"


def similarity(distance):
    """ "cosine" or "dot", as fastsim's losses call what a score is, or None for anything else."""
    if type(distance) not in _PRODUCTS:
        return None
    if not distance.normalize_embeddings:
        return "dot"
    return "cosine" if distance.p == 2 else None


def is_cosine(distance):
    """Whether larger is nearer, of unit rows."""
    return similarity(distance) == "cosine"


def of_distance(distance):
    """Against a distance that is neither cosine nor Euclidean, or that keeps statistics."""
    if is_cosine(distance) or (type(distance) is LpDistance and distance.p == 2):
        return of_changes(distance)
    return of_changes(distance) or f"no fused form of {distance}"


def of_changes(distance):
    """Against a distance that keeps statistics, or of which a method was replaced."""
    if distance.collect_stats:
        return "the statistics of a distance are taken of its matrix"
    changed = overrides.patched_attribute(distance)
    kind = type(distance)
    if changed is None and kind in _DISTANCES:
        shipped = ((name, _SHIPPED[kind, name]) for name in _METHODS)
        changed = next(
            (name for name, method in shipped if getattr(kind, name) is not method), None
        )
    if changed is not None:
        return f"{changed} of the distance has been replaced"
    return None


def of_scores(distance, similarities):
    """Against anything but these similarities to the power of one."""
    if similarity(distance) in similarities and distance.power == 1:
        return of_changes(distance)
    named = {"cosine": "cosines", "dot": "products"}
    served = " and ".join(named[kind] for kind in similarities)
    return f"no fused form of {distance} in this loss; {served} have one"


def of_order(distance):
    """Against a power under which another pair may be the hardest.

    A power above 0 keeps the order of Euclidean distances, and not that of cosines, some of which
    are negative.
    """
    if distance.power == 1 or (not is_cosine(distance) and distance.power > 0):
        return None
    return f"no fused form of {distance} to the power of {distance.power}"


def of_positive(loss, *names):
    """Against a number that the fused form wants above 0; off the CPU a tensor is not read."""
    for name in names:
        value = getattr(loss, name)
        read = not isinstance(value, torch.Tensor) or can_be_read(value)
        if read and not value > 0:
            return f"no fused form of a {name} that is not above 0"
    return None


def of_numbers(loss, *names):
    """Against parameters that are tensors or anything else but numbers."""
    numbers = all(isinstance(getattr(loss, name), (int, float)) for name in names)
    return None if numbers else "no fused form of parameters that are not numbers"


def of_cross_entropy(loss):
    """Against another cross entropy than that of theirs, such as one with smooth labels."""
    plain = overrides.is_plain(loss.cross_entropy, _CROSS_ENTROPY)
    return None if plain else "cross_entropy has been replaced"


def are_few(embeddings, ref_emb):
    """Whether there may be one positive pair and one negative at most, whose loss is 0 there."""
    return embeddings.shape[0] * ref_emb.shape[0] <= 2


def of_inputs(embeddings, labels, ref_emb, ref_labels):
    """Against inputs that the losses do not take."""
    if labels is None or ref_labels is None:
        return "without labels the pairs are the ones that are listed"
    if not {labels.dtype, ref_labels.dtype} <= set(INTEGRAL):
        return f"labels of {labels.dtype} and {ref_labels.dtype}; integers have a fused form"
    if embeddings.dtype not in FLOATING or ref_emb.dtype != embeddings.dtype:
        return f"embeddings of {embeddings.dtype} against references of {ref_emb.dtype}"
    if 0 in (*embeddings.shape, *ref_emb.shape):
        return "no embeddings"
    return None


def reduction(loss):
    """ "mean" or "sum" where the loss's reducer is that alone, else None."""
    reducer = loss.reducer
    if isinstance(reducer, MultipleReducers):
        reducer = dict(reducer.reducers).get("loss", reducer.default_reducer)
    if reducer.collect_stats or overrides.patched_attribute(reducer) is not None:
        return None
    return {MeanReducer: "mean", SumReducer: "sum"}.get(type(reducer))


def reduced(value):
    """A loss that is already reduced, as their reducers take it."""
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}


def by_row(losses):
    """Losses (N,) of the rows, as their reducers take them."""
    indices = torch.arange(losses.shape[0], device=losses.device)
    return {"losses": losses, "indices": indices, "reduction_type": "element"}

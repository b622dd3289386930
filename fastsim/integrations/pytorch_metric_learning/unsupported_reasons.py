"""What of pytorch-metric-learning has no fused form, as sentences, and saying so once."""

import warnings

import torch
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.reducers import MeanReducer, MultipleReducers, SumReducer

from fastsim.checks import FLOATING, INTEGRAL

_said = set()


def say_once(module, reason):
    """A warning that the answer is theirs, once for each class and reason."""
    name = type(module).__name__
    if (name, reason) not in _said:
        _said.add((name, reason))
        warnings.warn(
            f"{name}: {reason}; computed by pytorch-metric-learning's own code, in its memory",
            stacklevel=6,  # whoever called the module
        )


def is_cosine(distance):
    """Whether larger is nearer, of unit rows."""
    kinds = CosineSimilarity, DotProductSimilarity
    return type(distance) in kinds and distance.normalize_embeddings and distance.p == 2


def of_distance(distance):
    """Against a distance that is neither cosine nor Euclidean, or that keeps statistics."""
    if distance.collect_stats:
        return "the statistics of a distance are taken of its matrix"
    if is_cosine(distance) or (type(distance) is LpDistance and distance.p == 2):
        return None
    return f"no fused form of {distance}"


def of_cosine(distance):
    """Against anything but cosines to the power of one."""
    if is_cosine(distance) and distance.power == 1:
        return of_distance(distance)
    return f"no fused form of {distance} in a softmax; cosines have one"


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
    if reducer.collect_stats:
        return None
    return {MeanReducer: "mean", SumReducer: "sum"}.get(type(reducer))


def reduced(value):
    """A loss that is already reduced, as their reducers take it."""
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}


def by_row(losses):
    """Losses (N,) of the rows, as their reducers take them."""
    indices = torch.arange(losses.shape[0], device=losses.device)
    return {"losses": losses, "indices": indices, "reduction_type": "element"}

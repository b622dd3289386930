"""Losses in the form that the reducers of pytorch-metric-learning take."""

import torch
from pytorch_metric_learning.reducers import MeanReducer, MultipleReducers, SumReducer

from fastsim.integrations import overrides


def reduction(loss):
    """ "mean" or "sum" if the loss's reducer is only that, else None."""
    reducer = loss.reducer
    if isinstance(reducer, MultipleReducers):
        reducer = dict(reducer.reducers).get("loss", reducer.default_reducer)
    if reducer.collect_stats or overrides.patched_attribute(reducer) is not None:
        return None
    return {MeanReducer: "mean", SumReducer: "sum"}.get(type(reducer))


def already_reduced(value):
    """A loss that needs no reduction."""
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}


def per_row(losses):
    """Losses (N,), one per row."""
    indices = torch.arange(losses.shape[0], device=losses.device)
    return {"losses": losses, "indices": indices, "reduction_type": "element"}

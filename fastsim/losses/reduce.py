"""The names of `fastsim.reduce`."""

from fastsim.reduce import as_float, below_every_score, inverse, reduce, row_weights, softplus

__all__ = ["as_float", "below_every_score", "inverse", "reduce", "row_weights", "softplus"]

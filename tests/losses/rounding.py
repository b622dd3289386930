"""What the rounding of its inputs does to a loss and its gradients."""

import functools
import math

import torch

from tests.cases import BY_NAME, call, inputs, on_backend
from tests.measure import conditioning


@functools.lru_cache(maxsize=64)
def moves(name, shape, seed, reduction):
    """What a relative change of 1 of the inputs does to value and gradients, whatever the dtype.

    By the dense formula in float64: the oracle's loops would say the same, many times as slowly.
    """
    case = BY_NAME[name]
    tensors, others, options = inputs(case, shape, torch.float64, seed)
    options = dense_options(case, options, reduction)

    def results(moved):
        value, grads = call(case.loss, moved, others, options)
        return [value, *grads]

    return conditioning(results, tensors)


def dense_options(case, options, reduction):
    """Options of the dense formula."""
    rows = {} if reduction is None else {"reduction": reduction}
    return options | on_backend(case, "eager") | rows


def largest_exponent(case, tensors, options, losses):
    """How large the exponents are that the weights e^(z - L) of a gradient are made of, at most.

    A weight is rounded by eps times that: as z is, |z| <= steepest |s|, and as the logarithm L is,
    the loss of its row and z of its positive. 0 for a loss without exponents. losses: of the rows.
    """
    numbers = (case.loss.__kwdefaults__ or {}) | options
    beta = numbers.get("beta") or 0.0
    factors = [numbers.get(name) or 0.0 for name in ("scale", "gamma", "alpha", "beta")]
    if temperature := numbers.get("temperature"):
        factors.append((1 + beta) / temperature)
    steepest = max(factors)
    sides = [t for t in tensors if t is not None]
    score = 1.0
    if case.dot:  # at most the product of the longest of either side, of which there may be one
        lengths = [t.norm(dim=-1).max().item() for t in (sides * 2)[:2]]
        score = math.prod(lengths)
    if sides[0].dim() == 3:
        score *= sides[0].shape[1]  # a sum over the tokens of a query
    return steepest * score + losses.abs().max().item() if steepest else 0.0

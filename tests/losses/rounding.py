"""What the rounding of its inputs does to a loss and its gradients."""

import functools

import torch

from tests.cases import BY_NAME, call, inputs, takes_backend
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
    chosen = {"backend": "eager"} if takes_backend(case) else {}
    return options | chosen | ({} if reduction is None else {"reduction": reduction})

"""Temperatures, scales and biases that are tensors: what a kept loss makes of them in each call.

An operator takes a scale and a bias. A loss may follow from other numbers, such as a temperature,
and checks their values. So a shortcut (prepared.py) has to begin with the tensors of the caller.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.checks import can_be_read, check_number
from fastsim.precision import compute_dtype
from fastsim.reduce import inverse


class Learnt(NamedTuple):
    """Which of a loss's numbers are tensors, and what follows from them.

    tensors: those of one number that the caller gave, maybe none.
    scalars: (x, *tensors) -> {"scale": ...}, or {"scale": ..., "bias": ...}. Checks the values.
    """

    tensors: tuple[Tensor, ...]
    scalars: Callable[..., dict]

    def now(self, x):
        """The scalars of this call."""
        return self.scalars(x, *self.tensors)


NOT_LEARNT = Learnt((), lambda x: {})


def learnt_temperature(temperature):
    """The `Learnt` of a temperature, which makes scale = 1 / temperature."""
    if isinstance(temperature, Tensor):
        return Learnt((temperature,), _of_temperature)
    return Learnt((), partial(_of_temperature, temperature=temperature))


def _of_temperature(x, temperature):
    return {"scale": scale_of(temperature, x)}


def scale_of(temperature, x):
    """1 / temperature, of which a tensor's value is checked."""
    if isinstance(temperature, Tensor):
        temperature = checked("temperature", temperature, x, positive=True)
    return inverse(temperature, x)


def checked(name, value, x, *, positive=False):
    """A tensor of one, whose value is checked. It becomes a number in the compute type of x where
    that saves operations: on a CPU, without a gradient.
    """
    if (torch.is_grad_enabled() and value.requires_grad) or not can_be_read(value):
        check_number(name, value, positive=positive)
        return value
    number, dtype = value.item(), compute_dtype(x)
    check_number(name, number, positive=positive)
    return number if value.dtype == dtype else value.to(dtype).item()

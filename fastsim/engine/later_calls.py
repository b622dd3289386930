"""What a kept loss makes of the tensors of a later call: targets; a learnt temperature or scale.

A `OneCallLoss` is kept for calls with the same signature (prepared.py). Some of its fields follow
from tensors of the caller, beside x and y. They are made anew in each call, and it holds none of
these tensors in between.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastsim.checks import check_number
from fastsim.precision import compute_dtype
from fastsim.reduce import inverse

_USUAL = 1e-30  # between this and its inverse a number is fit for every use
_WITH_VALUES = {Tensor, torch.nn.Parameter}  # others may have none, as those of torch.compile


class Given(NamedTuple):
    """Tensors that the caller gave beside x and y, and what follows from them.

    fields: (x, *tensors) -> {name: value} for the fields of `OneCallLoss` in `names`. It checks the
        values of tensors of one.
    """

    tensors: tuple[Tensor, ...]
    fields: Callable[..., dict]
    names: tuple[str, ...]


NOTHING = Given((), lambda x: {}, ())


def given_temperature(temperature):
    """The `Given` of a temperature, from which scale = 1 / temperature follows."""
    if not isinstance(temperature, Tensor):
        return NOTHING
    return Given((temperature,), _of_temperature, ("scale",))


def _of_temperature(x, temperature):
    return {"scale": scale_of(temperature, x)}


def given_targets(targets, tile_of, scalars=NOTHING):
    """The `Given` of targets, and of the tensors from which scale and bias follow.

    targets: a matrix, two vectors of groups, or None.
    tile_of: (x, targets) -> {"tile": ..., "formula": ...}, which holds no tensor of this call.
    """
    if targets is None:
        return scalars
    alone = not isinstance(targets, (tuple, list))
    tensors = [targets] if alone else targets
    count, of_scalars = len(tensors), scalars.fields

    def fields(x, *tensors):
        targets = tensors[0] if alone else tensors[:count]
        return tile_of(x, targets) | of_scalars(x, *tensors[count:])

    return Given((*tensors, *scalars.tensors), fields, ("tile", "formula", *scalars.names))


def scale_of(temperature, x):
    """1 / temperature, of which a tensor's value is checked."""
    if isinstance(temperature, Tensor):
        temperature = checked("temperature", temperature, x, positive=True)
    return inverse(temperature, x)


def checked(name, value, x, *, positive=False):
    """A tensor of one, whose value is checked. It becomes a number in the compute type of x where
    that saves operations: on a CPU, without a gradient. Not for tensors inside torch.func.
    """
    learnt = value.requires_grad and torch.is_grad_enabled()
    if learnt or not value.is_cpu or type(value) not in _WITH_VALUES:
        check_number(name, value, positive=positive)
        return value
    number = value.item()
    if not _USUAL < number < 1 / _USUAL:
        check_number(name, number, positive=positive)
    return number if value.dtype is x.dtype else value.to(compute_dtype(x)).item()

"""Losses under `torch.autocast`.

Most of the work of a loss over a matrix of scores is in products. So a loss casts float32
embeddings to the dtype of the context, as `torch.mm` casts its operands. Products of the cast
numbers are exact; the scores, all that follows from them and the loss stay float32. The rest of the
loss is computed outside the context, so that no other product is rounded.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_AS_IT_IS = contextlib.nullcontext()


def without_autocast(device_type):
    """A context in which matrix products keep the precision of their operands."""
    return torch.autocast(device_type, enabled=False) if _is_on(device_type) else _AS_IT_IS


def joined(tensors):
    """The rows of the tensors, one after the other, under autocast too.

    On a CPU, `torch.cat` under autocast refuses the 16-bit dtype that is not that of the context.
    """
    with without_autocast(tensors[0].device.type):
        return torch.cat(tensors)


def in_autocast(*values):
    """The values with float32 tensors cast to the dtype of the autocast context.

    Tensors may be in tuples and lists. A tensor that occurs twice is cast once and stays one.
    """
    done: list[tuple[Tensor, Tensor]] = []
    return tuple(_cast(value, done) for value in values)


def embeddings_in_autocast(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a loss; the arguments with these names are embeddings or tuples of embeddings."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        places = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            first = args[0] if args else options.get(names[0])
            if not (isinstance(first, Tensor) and _is_on(first.device.type)):
                return function(*args, **options)
            given = dict(zip(places, args, strict=False)) | options
            if len(given) < len(args) + len(options):
                return function(*args, **options)  # which says what is wrong with them
            embeddings = {name: given[name] for name in names if name in given}
            cast = in_autocast(*embeddings.values())
            return function(**given | dict(zip(embeddings, cast, strict=True)))

        call.__kwdefaults__ = function.__kwdefaults__
        return call

    return decorate


def _is_on(device_type):
    there = device_type == "cpu" or torch.amp.is_autocast_available(device_type)
    return there and torch.is_autocast_enabled(device_type)


def _cast(value, done):
    """done: (tensor, the tensor cast) for those before."""
    if isinstance(value, (tuple, list)):
        return tuple(_cast(part, done) for part in value)
    if not (isinstance(value, Tensor) and value.dtype == torch.float32):
        return value
    if not _is_on(value.device.type):
        return value
    for before, after in done:
        if before is value:
            return after
    done.append((value, value.to(torch.get_autocast_dtype(value.device.type))))
    return done[-1][1]

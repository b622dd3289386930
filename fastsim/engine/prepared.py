"""A loss that one call makes looks at its arguments once for each signature.

Of a small batch the checks, and the records that say what is to be done, take longer than the loss.
They depend on what the arguments are (shapes, dtypes, numbers, names), not on what is in the
tensors. So what the first call of a signature has come to is kept, a function of the tensors alone,
and the next call goes straight there. A loss says itself (`note`) whether there is such a function:
not where a tensor's values have been looked at.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from fastsim.backends import default_name
from fastsim.batch_metrics import watched
from fastsim.engine.one_call import panels_alone
from fastsim.engine.sweep import asked_widths
from fastsim.operators import traced, transforming
from fastsim.precision import float32_products
from fastsim.verify.verdicts import changes

P = ParamSpec("P")
R = TypeVar("R")

MOST = 256  # signatures of a loss; more are forgotten
_PLAIN = {int, float, bool, str, type(None)}
_TENSORS = {torch.Tensor, torch.nn.Parameter}


class _Calls(threading.local):
    open: tuple = ()  # lists of what the calls at hand have come to


_calls = _Calls()


def note(tensors, whole, loss):
    """Says that `whole(*tensors)` made the loss, and does for any values of such tensors.

    whole.serves(*tensors) says whether it still does, where sizes and settings are these.
    """
    for notes in _calls.open[-1:]:
        notes.append((tensors, whole, loss))


def note_targets(x, y, targets, made, loss):
    """`note` of a loss that made(x, y, targets) is; targets: a matrix, two vectors of groups."""
    alone = not isinstance(targets, (tuple, list))

    def whole(x, y, *given):
        return made(x, y, given[0] if alone else given)

    note((x, y, targets) if alone else (x, y, *targets), Prepared(whole), loss)


class Prepared(NamedTuple):
    """What a loss does after its checks, as a function of its tensors; condition: on which."""

    function: Callable
    condition: Callable | None = None

    def serves(self, *tensors):
        """Whether it is still to be done that way."""
        return self.condition is None or self.condition(*tensors)

    def __call__(self, *tensors):
        return self.function(*tensors)


def once_per_signature(function: Callable[P, R]) -> Callable[P, R]:
    """A loss whose arguments are looked at once, where one call of the backend makes it."""
    known: dict[tuple, Any] = {}

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if traced() or panels_alone():
            return function(*args, **options)
        tensors, signature = _signature(args, options)
        if signature is None or _capturing(tensors):
            return function(*args, **options)
        whole = known.get(signature)
        if whole is not None and whole.serves(*tensors):
            return whole(*tensors)
        notes: list[Any] = []
        before = _calls.open
        _calls.open = (*before, notes)
        try:
            loss = function(*args, **options)
        finally:
            _calls.open = before
        for noted, whole, its_loss in notes:
            if its_loss is loss and _same(noted, tensors):
                if len(known) >= MOST:
                    known.clear()
                known[signature] = whole
        return loss

    call.__kwdefaults__ = function.__kwdefaults__
    return call


def _capturing(tensors):
    """Whether a CUDA graph is being recorded of them.

    A replay reads memory that the call has made. What is kept here may be forgotten before it, and
    what is made while recording belongs to the graph.
    """
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _same(one, other):
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _signature(args, options):
    """(the tensors, all that a loss depends on but their values); None for the latter if there may
    be more.
    """
    tensors, values = [], [*args, *options.values()]
    kinds = [*map(type, values)]  # 1 is not True
    for place, kind in enumerate(kinds):  # what stands in tuples comes last
        if kind in _PLAIN:
            continue
        value = values[place]
        if kind in _TENSORS and not value.is_nested:
            tensors.append(value)
            values[place] = value.shape, value.dtype, value.device, value.layout
        elif kind is tuple or kind is list:
            values[place] = len(value)
            values.extend(value)
            kinds.extend(map(type, value))
        else:
            return None, None
    if transforming(*tensors):
        return None, None
    ids = [id(tensor) for tensor in tensors]
    first = () if len({*ids}) == len(ids) else map(ids.index, ids)  # which are one tensor
    asked = asked_widths()
    prefixes = () if asked is None else (*asked.widths, *asked.weights)
    return tensors, (*kinds, *values, *options, *first, *_state(tensors), *prefixes)


def _state(tensors):
    """What beside its arguments decides how a loss is made."""
    on_cpu = not tensors or tensors[0].is_cpu
    products = float32_products("cpu" if on_cpu else "cuda")
    return default_name(), changes(), products, watched(), torch.is_inference_mode_enabled()

"""A cache that lets a loss check its arguments once for each signature.

For a small batch, checking the arguments and building the records of the loss takes longer than the
loss. Both depend on the signature (shapes, dtypes, numbers, names, settings), not on the values in
the tensors. So the first call with a signature leaves a shortcut, a function of the tensors alone,
and later calls use it. A loss decides itself whether there is a shortcut (`note`): not if it has
looked at values of a tensor at which the shortcut does not look again.
"""

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fastsim.backends import default_name, panel
from fastsim.backends.torch import compiled
from fastsim.batch_metrics import in_metrics
from fastsim.engine.one_call import panels_alone
from fastsim.engine.sweep import asked_widths
from fastsim.environment import Variable
from fastsim.operators import traced, transforming
from fastsim.precision import float32_products
from fastsim.verify.verdicts import changes

P = ParamSpec("P")
R = TypeVar("R")

MOST = 256  # signatures of one loss; when more turn up, all are forgotten
_PANEL, _COMPILE = Variable(panel.VARIABLE), Variable(compiled.VARIABLE)
_PLAIN = {int, float, bool, str, type(None)}
_TENSORS = {torch.Tensor, torch.nn.Parameter}


class _Calls(threading.local):
    open: tuple = ()  # for each call under way, the list of its notes


_calls = _Calls()
_shortcuts: list[dict] = []  # those of each loss, by signature


def note(tensors, shortcut, loss):
    """Notes that `shortcut(*tensors)` computed `loss`, as it would for others of this signature."""
    for notes in _calls.open[-1:]:
        notes.append((tensors, shortcut, loss))


def once_per_signature(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a loss, so that its arguments are checked once for each signature."""
    known: dict[tuple, Any] = {}
    _shortcuts.append(known)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if traced() or panels_alone():
            return function(*args, **options)
        tensors, signature = _signature(args, options)
        if signature is None or _capturing(tensors):
            return function(*args, **options)
        shortcut = known.get(signature)
        if shortcut is not None:
            return shortcut(*tensors)
        notes: list[Any] = []
        before = _calls.open
        _calls.open = (*before, notes)
        try:
            loss = function(*args, **options)
        finally:
            _calls.open = before
        for noted, shortcut, its_loss in notes:
            order = _order(noted, tensors)
            if its_loss is loss and order is not None:
                if len(known) >= MOST:
                    known.clear()
                known[signature] = _in_order(shortcut, order)
        return loss

    call.__kwdefaults__ = function.__kwdefaults__
    return call


def forget():
    """Forgets all shortcuts. Tests that replace a part of a backend call it."""
    for known in _shortcuts:
        known.clear()


def _capturing(tensors):
    """Whether a CUDA graph is being captured.

    A replay reads memory that the captured call allocated. A shortcut might be forgotten before the
    replay, and one made during the capture would hold memory of the graph.
    """
    for tensor in tensors:  # a generator would take longer than the question
        if tensor.is_cuda:
            return torch.cuda.is_current_stream_capturing()
    return False


def _order(noted, tensors):
    """The place of each noted tensor among those of the call; None if they are not the same."""
    if len(noted) == len(tensors) and all(map(operator.is_, noted, tensors)):
        return [*range(len(noted))]
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if len(noted) != len(tensors) or {*places} != {*map(id, noted)}:
        return None
    return [places[id(tensor)] for tensor in noted]


def _in_order(shortcut, order):
    """The shortcut as a function of the tensors in the order of the call."""
    if order == [*range(len(order))]:
        return shortcut
    return lambda *tensors: shortcut(*(tensors[place] for place in order))


def _signature(args, options):
    """(the tensors, the signature: all that a loss depends on except their values).

    The signature is None if the loss may depend on more.
    """
    tensors, values = [], [*args, *options.values()]
    kinds = [*map(type, values)]  # 1 is not True
    for place, kind in enumerate(kinds):  # the items of tuples are appended on the way
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
    first = () if len({*ids}) == len(ids) else map(ids.index, ids)  # which ones are the same tensor
    asked = asked_widths()
    prefixes = () if asked is None else (*asked.widths, *asked.weights)
    return tensors, (*kinds, *values, *options, *first, *_state(tensors), *prefixes)


def _state(tensors):
    """The settings, besides its arguments, that decide how a loss is computed."""
    on_cpu = not tensors or tensors[0].is_cpu
    products = float32_products("cpu" if on_cpu else "cuda")
    modes = in_metrics(), torch.is_inference_mode_enabled()
    return default_name(), changes(), products, *modes, _PANEL.value(), _COMPILE.value()

"""A small loss looks at its arguments once for each signature.

Of a small batch the checks, and the records that say what is to be done, take longer than the loss.
They depend on what the arguments are (shapes, dtypes, numbers, names), not on what is in the two
tensors of embeddings. So what the first call of a signature has come to is kept, and the next goes
straight to the one call that makes the loss and its gradients. Whatever else is a tensor may hold
anything: a call that has one is looked at anew.
"""

import functools
import threading

import torch

from fastsim.backends import default_name
from fastsim.batch_metrics import watched
from fastsim.operators import transformed

MOST = 256  # signatures of a loss; more are forgotten
_PLAIN = {int, float, bool, str, type(None)}
_ROWS = {torch.Tensor, torch.nn.Parameter}

_calls = threading.local()  # `open`: lists of what the calls at hand have come to


def note(rows, small, loss):
    """Says that `small(*rows)` made the loss: (x, y), y None for x itself."""
    for notes in getattr(_calls, "open", ())[-1:]:
        notes.append((rows, small, loss))


def once_per_signature(function):
    """A loss whose arguments are looked at once, where one call of the backend makes it."""
    known = {}

    @functools.wraps(function)
    def call(*args, **options):
        if torch.compiler.is_compiling():
            return function(*args, **options)
        rows, signature = _signature(args, options)
        if signature is None:
            return function(*args, **options)
        small = known.get(signature)
        if small is not None and small.serves(*rows):
            return small(*rows)
        notes, before = [], getattr(_calls, "open", ())
        _calls.open = (*before, notes)
        try:
            loss = function(*args, **options)
        finally:
            _calls.open = before
        for of_rows, small, its_loss in notes:
            if its_loss is loss and _same(of_rows, rows):
                if len(known) >= MOST:
                    known.clear()
                known[signature] = small
        return loss

    call.__kwdefaults__ = function.__kwdefaults__
    return call


def _same(one, other):
    return all(a is b for a, b in zip(one, other, strict=True))


def _signature(args, options):
    """((x, y), all that a loss depends on but their values); None for the latter if it is more."""
    rows, parts = [], []
    for values in (args, options.values()):
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                # With its type: 1 is not True.
                parts += kind, value
            elif kind in _ROWS and not value.is_nested:
                rows.append(value)
                parts += kind, value.shape, value.dtype, value.device, value.layout
            else:
                return None, None
    if len(rows) != 2 or watched() or transformed(*rows):
        return None, None
    x, y = rows
    alone = x is y
    state = alone, default_name(), torch.is_inference_mode_enabled()
    return (x, None if alone else y), (*parts, *options, *state)

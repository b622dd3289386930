"""Classes of ours whose `__module__` is that of theirs, and which can still be pickled."""

import importlib

from fastsim.integrations.overrides import stands_for

_homes = {}  # class of ours -> the name of its real module


class InTheirModule:
    """Mixed in before a class of sentence-transformers.

    Model cards link the documentation of a loss by the module of its class, so ours names the
    module of the class whose place it takes. A user's subclass is left alone.
    """

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        theirs = stands_for(cls)
        if theirs is not None and cls.__module__.startswith(__package__):
            _homes[cls] = cls.__module__
            cls.__module__ = theirs.__module__

    def __reduce_ex__(self, protocol):
        """pickle finds a class of ours in its real module."""
        home = _homes.get(type(self))
        if home is None:
            return super().__reduce_ex__(protocol)
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return _blank, (home, type(self).__name__), *state


def _blank(home, name):
    kind = getattr(importlib.import_module(home), name)
    return kind.__new__(kind)

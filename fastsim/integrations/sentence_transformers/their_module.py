"""A class of ours that says it is from the module of theirs, and is pickled from where it is."""

import importlib

from fastsim.integrations.overrides import stands_for

_homes = {}  # class of ours -> the module that it is in


class InTheirModule:
    """Mixed in before a class of sentence-transformers.

    Model cards take the documentation of a loss from the module of its class, so a class of ours
    says that it is from where the one is that it stands for. Somebody's subclass stays where it is.
    """

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        theirs = stands_for(cls)
        if theirs is not None and cls.__module__.startswith(__package__):
            _homes[cls] = cls.__module__
            cls.__module__ = theirs.__module__

    def __reduce_ex__(self, protocol):
        """Ours is found again where it is, not where its class says."""
        home = _homes.get(type(self))
        if home is None:
            return super().__reduce_ex__(protocol)
        _, _, *state = super().__reduce_ex__(max(protocol, 2))
        return _blank, (home, type(self).__name__), *state


def _blank(home, name):
    kind = getattr(importlib.import_module(home), name)
    return kind.__new__(kind)

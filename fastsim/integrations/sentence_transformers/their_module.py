"""A class of ours that says it is from the module of theirs, and is pickled from where it is."""

import importlib

_homes = {}  # class of ours -> the module that it is in


class InTheirModule:
    """Mixed in before a class of sentence-transformers.

    `their_module`: where the class is that it stands for. Model cards take its documentation from
    there, so the class says that it is from there too.
    """

    def __init_subclass__(cls, their_module=None, **options):
        super().__init_subclass__(**options)
        if their_module is not None:
            _homes[cls] = cls.__module__
            cls.__module__ = their_module

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

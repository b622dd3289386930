"""Finds methods of a peer's class that somebody has replaced.

A class of ours in the place of a peer's computes the loss without calling them. Whoever replaced
such a method, a hook, means it to run: then the peer's own code runs, and a warning says so once.
"""

import sys
import types
import warnings

_said = set()
_UNKNOWN = object()


def say_once(module, sentence, package, *, stacklevel=2):
    """A warning that `package`'s own code computes the loss, once for each class and sentence.

    stacklevel: of whoever called the caller, as `warnings.warn` counts.
    """
    name = type(module).__name__
    if (name, sentence) not in _said:
        _said.add((name, sentence))
        warnings.warn(
            f"{name}: {sentence}; {package}'s own code computes it, with its memory",
            stacklevel=stacklevel + 1,
        )


class Hooked:
    """Mixed in before a class of a peer; `hooks` names what of it the fused form does not call.

    The class of ours says them once, `class Ours(Hooked, Theirs, hooks=("method",))`; subclasses
    inherit them. Said or not, every function that the peer's module defines beside its class is a
    hook too, and so is, in the peer's class, every method that ours has one in the place of.
    """

    _originals, _functions, _covered = {}, {}, {}

    def __init_subclass__(cls, hooks=None, **options):
        super().__init_subclass__(**options)
        cls._covered = cls._covered | _covered(cls)
        # What a class before this one has seen was there first: a patch may have come since.
        cls._functions = _functions_beside(cls) | cls._functions
        if hooks is not None:
            cls._originals = {hook: _as_shipped(cls, hook) for hook in hooks if hasattr(cls, hook)}

    def replaced_hook(self):
        """The name of a hook that a subclass, a patch or an attribute has replaced, or None."""
        kind, own = type(self), self.__dict__
        for hook, original in self._originals.items():
            if hook in own or getattr(kind, hook, None) is not original:
                return hook
        for (beside, name), original in self._functions.items():
            if getattr(beside, name, None) is not original:
                return name
        for (theirs, name), original in self._covered.items():
            if getattr(theirs, name, None) is not original:
                return name
        return None


def stands_for(cls):
    """The class that `cls` stands for, which has its name, or None."""
    # The last one: before it there may be ours, of which somebody has made another of that name.
    kinds = [kind for kind in cls.__mro__[1:] if kind.__name__ == cls.__name__]
    return kinds[-1] if kinds else None


def _functions_beside(cls):
    """{(module, name): function} of those that the module of the class `cls` stands for defines."""
    theirs = stands_for(cls)
    if theirs is None or issubclass(theirs, Hooked):  # the latter is a user's own
        return {}
    module = sys.modules[theirs.__module__]
    return {
        (module, name): value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    }


def _covered(cls):
    """{(their class, name): their method} of those that a class before theirs overrides."""
    theirs = stands_for(cls)
    if theirs is None:
        return {}
    before = cls.__mro__[: cls.__mro__.index(theirs)]
    names = sorted({name for kind in before for name in vars(kind)})
    return {(theirs, name): _as_shipped(theirs, name) for name in names if _is_hook(theirs, name)}


def _is_hook(theirs, name):
    """Whether that is a method of the package of `theirs`, by which the loss may be computed."""
    special = name.startswith("__") and name != "__call__"
    owner = next((kind for kind in theirs.__mro__ if name in vars(kind)), None)
    if special or name == "get_config_dict" or owner is None:
        return False
    packages = {kind.__module__.partition(".")[0] for kind in (owner, theirs)}
    return len(packages) == 1 and isinstance(vars(owner)[name], types.FunctionType)


def _as_shipped(cls, hook):
    """The method of that name; something that nothing equals where it was patched before us."""
    owner = next(kind for kind in cls.__mro__ if hook in vars(kind))
    found = getattr(cls, hook)
    module = sys.modules[owner.__module__]
    return found if getattr(found, "__module__", None) == module.__name__ else _UNKNOWN


def patched_attribute(module):
    """The name of a method that an attribute of this very object hides, or of a hook of torch."""
    kind = type(module)
    for name, value in vars(module).items():
        if callable(getattr(kind, name, None)):
            return name
        if name.endswith("_hooks") and value:
            return name.strip("_")
    return None


def is_plain(module, wanted):
    """Whether a torch module is what `wanted` is: its class, its options, nothing hooked."""
    if type(module) is not type(wanted):
        return False
    ours, theirs = ({k: v for k, v in vars(m).items() if k != "training"} for m in (module, wanted))
    return ours == theirs

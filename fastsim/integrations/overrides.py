"""What of a peer's class somebody has replaced, so that it is not passed over, and saying so once.

A class of ours in the place of a peer's computes the loss without calling every method that the
peer's code calls. Whoever replaced such a method, a hook, means it to run: then theirs runs.
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
    inherit them. Every function that the peer's module defines beside its class is a hook too.
    """

    _originals, _functions, _beside = {}, {}, {}

    def __init_subclass__(cls, hooks=None, **options):
        super().__init_subclass__(**options)
        if hooks is not None:
            cls._originals = {hook: _as_shipped(cls, hook) for hook in hooks if hasattr(cls, hook)}
            cls._beside = _module_of_theirs(cls)
            cls._functions = {
                name: value
                for name, value in cls._beside.items()
                if isinstance(value, types.FunctionType)
                and value.__module__ == cls._beside["__name__"]
            }

    def replaced_hook(self):
        """The name of a hook that a subclass, a patch or an attribute has replaced, or None."""
        kind, own = type(self), self.__dict__
        for hook, original in self._originals.items():
            if hook in own or getattr(kind, hook, None) is not original:
                return hook
        for name, original in self._functions.items():
            if self._beside.get(name) is not original:
                return name
        return None


def _module_of_theirs(cls):
    """What the module has of the class that `cls` stands for, which has its name."""
    theirs = (kind.__module__ for kind in cls.__mro__[1:] if kind.__name__ == cls.__name__)
    return next((vars(sys.modules[module]) for module in theirs), {})


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

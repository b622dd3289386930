"""Finds out why a loss cannot be fused, above all what of the peer's class was replaced.

A fused loss does not call the methods of the peer's class whose place it takes. Somebody who has
replaced such a method (a hook) expects it to run. The peer's own code then computes the loss, and
a warning gives the reason once. The same holds for an option that has no fused form.
"""

import sys
import types
import warnings

_warned = set()  # (name of the class, reason)
_UNKNOWN = object()


def warn_once(module, reason, package):
    """Warns that `package`'s own code computes the loss, once for each class and reason.

    The warning has the line of the user's code that called the loss.
    """
    name = type(module).__name__
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        warnings.warn(
            f"{name}: {reason}; {package}'s own code computes the loss, without saving memory",
            stacklevel=_users_level(package),
        )


def _users_level(package):
    """The caller's `stacklevel` for the innermost line outside of fastsim, torch and the package.

    It is no fixed number: a class may be reached through more calls of the package than another.
    """
    within = "fastsim", "torch", package.replace("-", "_")
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in within:
        frame, level = frame.f_back, level + 1
    return level


def no_fused_form(name):
    """The reason where the value of an option has no fused form."""
    return f"{name} has no fused form"


def replaced(name):
    """The reason where something that the fused form does not call has been replaced."""
    return f"{name} has been replaced"


class Hooked:
    """Mixed in before a class of a peer; `hooks` names its methods that the fused form skips.

    A class of ours declares them, `class Ours(Hooked, Theirs, hooks=("method",))`, and subclasses
    inherit them. Two more kinds of hook need no declaration: every function that the module of the
    peer's class defines, and every method of the peer's class that ours overrides.
    """

    _package = None  # the peer's name, for warnings
    _originals, _functions, _covered = {}, {}, {}

    def __init_subclass__(cls, hooks=None, **options):
        super().__init_subclass__(**options)
        cls._covered = cls._covered | _covered(cls)
        # What a base class has recorded comes first: a patch may have been made since.
        cls._functions = _functions_beside(cls) | cls._functions
        if hooks is not None:
            cls._originals = {hook: _as_shipped(cls, hook) for hook in hooks if hasattr(cls, hook)}

    def unfused_reason(self, *inputs):
        """Why the loss of these inputs is not fused, or None.

        A clause without a full stop, such as "scale has no fused form". inputs: those of the loss,
        for classes where the reason may lie in them.
        """
        hook = self.replaced_hook()
        return None if hook is None else replaced(hook)

    def is_unfused(self, *inputs):
        """Whether the peer's code has to compute the loss of these inputs; warns once, with why."""
        reason = self.unfused_reason(*inputs)
        if reason is not None:
            warn_once(self, reason, self._package)
        return reason is not None

    def replaced_hook(self):
        """The name of a hook that a subclass, a patch or an attribute has replaced, or None."""
        kind, attributes = type(self), self.__dict__
        for hook, original in self._originals.items():
            if hook in attributes or getattr(kind, hook, None) is not original:
                return hook
        for (module, name), original in self._functions.items():
            if getattr(module, name, None) is not original:
                return name
        for (theirs, name), original in self._covered.items():
            if getattr(theirs, name, None) is not original:
                return name
        return None


def stands_for(cls):
    """The peer's class whose place `cls` takes: its last base class of the same name, or None."""
    # The last one, since a user may have derived a class of the same name from ours.
    kinds = [kind for kind in cls.__mro__[1:] if kind.__name__ == cls.__name__]
    return kinds[-1] if kinds else None


def _functions_beside(cls):
    """{(module, name): function} defined in the module of the class whose place `cls` takes."""
    theirs = stands_for(cls)
    if theirs is None or issubclass(theirs, Hooked):  # the latter: `cls` is a user's
        return {}
    module = sys.modules[theirs.__module__]
    return {
        (module, name): value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    }


def _covered(cls):
    """{(their class, name): their method} of the methods that a class before theirs overrides."""
    theirs = stands_for(cls)
    if theirs is None:
        return {}
    before = cls.__mro__[: cls.__mro__.index(theirs)]
    names = sorted({name for kind in before for name in vars(kind)})
    return {(theirs, name): _as_shipped(theirs, name) for name in names if _is_hook(theirs, name)}


def _is_hook(theirs, name):
    """Whether this is a method of the peer's package that may take part in the loss."""
    special = name.startswith("__") and name != "__call__"
    owner = next((kind for kind in theirs.__mro__ if name in vars(kind)), None)
    if special or name == "get_config_dict" or owner is None:
        return False
    packages = {kind.__module__.partition(".")[0] for kind in (owner, theirs)}
    return len(packages) == 1 and isinstance(vars(owner)[name], types.FunctionType)


def _as_shipped(cls, hook):
    """The method as the package ships it; a value equal to nothing if it was patched already."""
    owner = next(kind for kind in cls.__mro__ if hook in vars(kind))
    found = getattr(cls, hook)
    module = sys.modules[owner.__module__]
    return found if getattr(found, "__module__", None) == module.__name__ else _UNKNOWN


def patched_attribute(module):
    """The name of a method that an attribute of the object hides, or of torch hooks on it."""
    kind = type(module)
    for name, value in vars(module).items():
        if callable(getattr(kind, name, None)):
            return name
        if name.endswith("_hooks") and value:
            return name.strip("_")
    return None


def is_plain(module, reference):
    """Whether a torch module has the class and options of `reference`, and no hooks of its own."""
    if type(module) is not type(reference):
        return False
    one, other = (
        {name: value for name, value in vars(m).items() if name != "training"}
        for m in (module, reference)
    )
    return one == other

"""Modules that take the place of a peer's: names that they lack are looked up in the peer."""

import contextlib
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def check_version(package, *least):
    """ImportError if the installed package is older than `least`, which is 1, 5, 21 for 1.5.21.

    A suffix, as of a release candidate, is ignored. A package that is on the path without being
    installed has no version and passes.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    parts = re.match(r"\d+(\.\d+)*", found)
    numbers = [int(part) for part in parts[0].split(".")] if parts else []
    numbers += [0] * (len(least) - len(numbers))
    if tuple(numbers) < least:
        wanted = ".".join(map(str, least))
        raise ImportError(f"{package}: wanted version {wanted} or later, got {found}")


def forwarding(name, *theirs):
    """(__getattr__, __dir__, __all__) of the module `name`, which takes the place of `theirs`.

    A name that the module lacks is looked up in `theirs`, in order, at the time of the access. A
    module may be given as a function that imports it; it is skipped if the import fails. Names with
    two leading underscores are not forwarded: `__path__` would let Python import the peer's files
    under our name. `__all__` is what `import *` gives for `theirs`.
    """

    def modules():
        for module in theirs:
            if isinstance(module, ModuleType):
                yield module
                continue
            with contextlib.suppress(ImportError):
                yield module()

    def __getattr__(attribute):  # noqa: N807
        if not attribute.startswith("__"):
            for module in modules():
                if hasattr(module, attribute):
                    return getattr(module, attribute)
        names = " or ".join(module.__name__ for module in modules())
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}, nor has {names}")

    def __dir__():  # noqa: N807
        known = set(vars(sys.modules[name]))
        for module in modules():
            known.update(n for n in dir(module) if not n.startswith("__"))
        return sorted(known)

    exported = []
    for module in theirs:
        if isinstance(module, ModuleType):
            public = (n for n in vars(module) if not n.startswith("_"))
            exported.extend(getattr(module, "__all__", public))
    return __getattr__, __dir__, exported

"""fastsim: the losses of embedding models, fast, exact and small in memory.

The public names are those of `fastsim/public.py` and `Encoder`; modules of the losses and their
dense specifications are in `fastsim.losses`. Importing needs torch and numpy alone, and those only
when a name is first asked for, so that `fastsim --help` does not wait for torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastsim.encoders.encoder import Encoder as Encoder
    from fastsim.public import *  # noqa: F403


def _load():
    """The public names become names of this module."""
    public = importlib.import_module("fastsim.public")
    names = getattr(public, "__all__", None)
    if names is not None and "__all__" not in globals():  # else it is being imported just now
        globals().update({name: getattr(public, name) for name in names})
        globals()["__all__"] = sorted(["Encoder", *names])


def __getattr__(name):
    """A public name on first use; `Encoder` alone wants more than torch and numpy."""
    if name == "Encoder":
        from fastsim.encoders.encoder import Encoder

        return Encoder
    if name == "__all__" or not name.startswith("__"):
        _load()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    _load()
    return sorted({*globals(), "Encoder"})


if sys.modules.get("torch"):
    _load()  # there is nothing to wait for

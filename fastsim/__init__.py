"""fastsim: the losses of embedding models, fast, exact and small in memory.

The public names are `Encoder` and the names in `fastsim/public.py`. `fastsim.losses` also has each
loss as a module and as a dense specification. The package needs only torch and numpy, and imports
them when a name is first used, so that `fastsim --help` does not wait for torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fastsim.encoders.encoder import Encoder as Encoder
    from fastsim.public import *  # noqa: F403


def _load():
    """Makes the public names names of this module."""
    public = importlib.import_module("fastsim.public")
    names = getattr(public, "__all__", None)
    if names is not None and "__all__" not in globals():  # None while its import is under way
        globals().update({name: getattr(public, name) for name in names})
        globals()["__all__"] = sorted(["Encoder", *names])


def __getattr__(name):
    """Loads a public name on first use; only `Encoder` needs more than torch and numpy."""
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
    _load()  # torch is imported already: nothing to wait for

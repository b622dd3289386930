"""Imports open_clip, or at least its losses."""

import functools
import importlib
import importlib.util
import sys

from fastsim.integrations import names

_ALONE = "_open_clip_loss"  # the name of the module when the package cannot be imported


def package():
    """The package open_clip. ImportError if it, or a package that it imports, is missing."""
    return importlib.import_module("open_clip")


@functools.cache
def losses():
    """open_clip.loss, imported alone if torchvision or timm is missing, which it does not need."""
    found = importlib.util.find_spec("open_clip")
    if found is None:
        raise ImportError(
            "fastsim.integrations.open_clip stands in for classes of open_clip, which is not"
            " installed: pip install open_clip_torch"
        )
    names.check_version("open_clip_torch", 3, 3)
    try:
        return importlib.import_module("open_clip.loss")
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("torchvision", "timm"):
            raise
    path = f"{found.submodule_search_locations[0]}/loss.py"
    spec = importlib.util.spec_from_file_location(_ALONE, path)
    sys.modules[_ALONE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_ALONE])
    return sys.modules[_ALONE]

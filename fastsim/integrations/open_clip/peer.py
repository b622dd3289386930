"""open_clip itself, as far as it is here."""

import functools
import importlib
import importlib.util
import sys

from fastsim.integrations import names

_LONE = "_open_clip_loss"


def package():
    """open_clip. ImportError where it, or what it imports, is not installed."""
    return importlib.import_module("open_clip")


@functools.cache
def losses():
    """open_clip.loss; alone where the package lacks torchvision, which the losses do not need."""
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
    spec = importlib.util.spec_from_file_location(_LONE, path)
    sys.modules[_LONE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_LONE])
    return sys.modules[_LONE]

"""Whether Triton is installed, and which version, without importing it."""

import functools
import importlib.util
from importlib import metadata

FOUND = importlib.util.find_spec("triton") is not None  # not a function: torch.compile reads it


@functools.cache
def version():
    """Triton's version; "" if it is not installed or its package is not found.

    The package has other names for some devices and systems: pytorch-triton-rocm, triton-windows.
    """
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        # The package of the module is looked up among all that are installed, which takes 0.7 s.
        names = metadata.packages_distributions().get("triton")
        return metadata.version(names[0]) if names else ""

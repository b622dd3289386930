"""Whether Triton is installed, and which, without importing it."""

import functools
import importlib.util
from importlib import metadata

FOUND = importlib.util.find_spec("triton") is not None  # no function: torch.compile reads it


@functools.cache
def version():
    """Triton's version; "" where it is not installed or no package says that it holds it.

    Its package has other names for some devices and systems: pytorch-triton-rocm, triton-windows.
    """
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        # Which package holds the module is looked for among all that are installed, in 0.7 s.
        names = metadata.packages_distributions().get("triton")
        return metadata.version(names[0]) if names else ""

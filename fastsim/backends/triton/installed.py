"""Which Triton is installed, without importing it."""

import functools
from importlib import metadata


@functools.cache
def version():
    """Triton's version, "" without one.

    Its package has other names for some devices and systems: pytorch-triton-rocm, triton-windows.
    """
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        # Which package holds the module is looked for among all that are installed, in 0.7 s.
        names = metadata.packages_distributions().get("triton")
        return metadata.version(names[0]) if names else ""

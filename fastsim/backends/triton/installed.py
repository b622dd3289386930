"""Whether Triton is installed, which version, and whether it can launch, without importing it."""

import functools
import importlib.util
import os
import shutil
from importlib import metadata

from fastsim.operators import constant_once

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


@constant_once
def has_compiler():
    """Whether there is a C compiler, with which Triton builds the launcher of each kernel.

    Triton takes the program that CC names, else gcc or clang.
    """
    program = os.environ.get("CC")
    programs = ("gcc", "clang") if program is None else (program,)
    return any(map(shutil.which, programs))

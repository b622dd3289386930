"""What this installation has: versions and backends."""

import platform
import sys
from importlib import metadata

import numpy
import torch

import fastsim
from fastsim.backends import backends, get, pick


def report():
    """The text of `fastsim info`."""
    lines = [
        f"fastsim {fastsim.__version__}",
        f"torch   {torch.__version__} ({torch.get_num_threads()} threads)",
        f"numpy   {numpy.__version__}",
        f"python  {sys.version.split()[0]} on {platform.machine()}",
        "",
        "backends",
    ]
    for name, reason in backends().items():
        state = f"usable{get(name).note()}" if reason is None else f"not here: {reason}"
        lines.append(f"  {name:<7} {state}")
    lines.append(f"on CPU tensors `auto` takes {pick(None, torch.empty(1)).name}")
    if warning := namesake():
        lines += ["", warning]
    return "\n".join(lines)


def namesake():
    """A sentence where another project of the import name is installed too, else None."""
    try:
        version = metadata.version("fastsim")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"warning: the distribution fastsim {version} is installed too. It is another project (a"
        " vehicle model) with the same import name, and the two overwrite each other's files:"
        " uninstall both, then install fastsim-losses again"
    )

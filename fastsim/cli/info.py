"""What this installation has: versions and backends."""

import platform
import sys

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
    return "\n".join(lines)

"""The instruction sets that the kernels are compiled for, each in a fresh process."""

import os
import platform
import subprocess
import sys

# Where a set is wanting, the next lower one serves.
SETS = ("avx512", "avx2", "generic") if platform.machine() in ("x86_64", "AMD64") else ("neon",)


def said(code, instructions):
    """What Python code prints where these instructions are asked for."""
    environment = os.environ | {"FASTSIM_INSTRUCTION_SET": instructions}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout

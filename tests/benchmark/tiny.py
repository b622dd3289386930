"""A run of `fastsim bench` that takes a moment, and one that does not end."""

import os
import time

from fastsim.benchmark.run import run
from fastsim.benchmark.settings import Settings


def tiny(**options):
    kept = {"sizes": (8, 16), "dims": (6,), "seconds": 0.01, "measures": ("time",)}
    return run(Settings(**kept | options), progress=False)


def lasting(*_, **__):
    print(os.getpid(), flush=True)
    time.sleep(3600)

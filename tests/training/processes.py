"""Training runs in processes of their own, which a test may kill.

They are forked from one process that has imported what training needs, so that importing costs its
seconds once.
"""

import multiprocessing
import os

from fastsim.training import report_lines, stopping, trainer  # noqa: F401 - for the forks
from fastsim.training.run import train
from tests.training.pictures import leave_empty

CONTEXT = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")


def start(options, said):
    """A process that runs `train(options)`; what it says goes to the file `said`."""
    if CONTEXT.get_start_method() == "forkserver":
        CONTEXT.set_forkserver_preload([__name__])
    process = CONTEXT.Process(target=_train, args=(options, str(said)))
    process.start()
    return process


def _train(options, said):
    with open(said, "w") as handle:
        os.dup2(handle.fileno(), 2)
    leave_empty()
    train(options)

"""Training runs in processes of their own, which a test may kill, or several as one group.

They are forked from one process that has imported what training needs, so that importing costs its
seconds once.
"""

import multiprocessing
import os
import time
from multiprocessing.connection import wait

import torch

from fastsim.training import report_lines, stopping, trainer  # noqa: F401 - for the forks
from fastsim.training.run import train
from tests.rendezvous import rendezvous
from tests.training.pictures import leave_empty

LIMIT = 1200  # seconds until what hangs is ended, on a machine that does other things beside
CONTEXT = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")


def start(options, said, waits_at):
    """A process that runs `train(options)`; what it says goes to the file `said`.

    waits_at: a step at whose end it waits for a signal, so that none comes when all is over.
    """
    return _start(_train, options, str(said), waits_at)


def _start(function, *arguments):
    if CONTEXT.get_start_method() == "forkserver":
        CONTEXT.set_forkserver_preload([__name__])
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def _train(options, said, waits_at):
    with open(said, "w") as handle:
        os.dup2(handle.fileno(), 2)
    leave_empty()
    on_step_end = stopping.Watch.on_step_end

    def wait_for_signal(self, args, state, control, **more):
        end = time.monotonic() + LIMIT
        while state.global_step == waits_at and not self.signal and time.monotonic() < end:
            time.sleep(0.01)
        on_step_end(self, args, state, control, **more)

    stopping.Watch.on_step_end = wait_for_signal
    train(options)


def run_together(folder, function, *arguments, count=2, environment=()):
    """function(*arguments) in processes that find each other as those of torchrun do.

    Returns what each of them printed. What they say is in `folder`; one that fails ends all.
    """
    with rendezvous(count) as common:
        common |= dict(environment)
        places = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
        processes = [_start(_run, place, str(folder), function, arguments) for place in places]
        end, running = time.monotonic() + LIMIT, processes
        while running and time.monotonic() < end and not any(p.exitcode for p in processes):
            wait([process.sentinel for process in running], timeout=1)
            running = [process for process in running if process.exitcode is None]
        for process in processes:
            process.kill()
            process.join()
    said = [[(folder / f"{rank}.{kind}").read_text() for rank in range(count)] for kind in KINDS]
    codes = [process.exitcode for process in processes]
    assert codes == [0] * count, (
        f"exit codes {codes} (-9: ended here)\n{[s[-6000:] for s in said[1]]}"
    )
    return said[0]


KINDS = ("out", "err")


def _run(environment, folder, function, arguments):
    for number, kind in enumerate(KINDS, 1):
        with open(f"{folder}/{environment['RANK']}.{kind}", "w") as handle:
            os.dup2(handle.fileno(), number)
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    function(*arguments)

"""Runs tasks in separate processes, so that a task that fails, hangs or crashes ends no other task.

After an illegal access on a GPU the process cannot use the GPU any more. Such a process is
replaced, and the parts of its task are run again one by one.
"""

import collections
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from fastsim.benchmark.calls import reason
from fastsim.environment import variables
from fastsim.verify.process import THREADS


class Task(NamedTuple):
    """A function of result rows, which another process imports and calls with the arguments.

    about: the entries of a row that stands for missing rows. parts: the tasks that replace this one
        if its process is lost.
    """

    about: dict
    function: Callable
    arguments: tuple = ()
    parts: tuple = ()

    def without(self, why):
        """Rows with the reason why there are no results, one for each part if there are parts."""
        rows = [row for part in self.parts for row in part.without(why)]
        return rows or [self.about | {"not measured": why}]


class Worker:
    """A process that does one task after the other."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(worker_end,), daemon=True)
        self.process.start()
        worker_end.close()
        self.started = False

    def do(self, task, seconds):
        """(rows, None), or (rows so far or None, why the process is lost)."""
        try:
            # The time to start the process does not count as the task's.
            self.started = self.started or self.pipe.recv()
            self.pipe.send((task.function, task.arguments))
            if not self.pipe.poll(seconds):
                return None, f"no result within {seconds:.0f} s"
            rows, why, lost = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return None, f"the process ended with code {self.process.exitcode}"
        return (task.without(why) if rows is None else rows), lost

    def end(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe):
    """The loop of a worker process, until the pipe is closed."""
    import torch  # noqa: F401  (takes most of the time to start)

    pipe.send(True)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            rows = why = None
            try:
                rows = function(*arguments)
            except Exception as error:  # any error becomes a row of the results
                why = reason(error)
            pipe.send((rows, why, _device_error()))


def _device_error():
    """The reason why this process cannot use its device any more, or None.

    If there is none, the memory that torch caches is returned to the device.
    """
    import torch

    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        return reason(error)
    return None


def run(tasks, note, *, workers, deadline, seconds):
    """Runs every task in one of `workers` processes and calls note(rows) with its rows.

    One process does the tasks in order. Several processes use one thread each.
    deadline: the time.monotonic() after which no task begins. seconds: that a task may take.
    """
    alone = contextlib.nullcontext() if workers == 1 else variables(dict.fromkeys(THREADS, "1"))
    with alone:
        _run(tasks, note, workers, deadline, seconds)


def _run(tasks, note, workers, deadline, seconds):
    waiting, lock = collections.deque(tasks), threading.Lock()
    threads = [
        threading.Thread(target=_work, args=(waiting, lock, note, deadline, seconds))
        for _ in range(min(workers, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(waiting, lock, note, deadline, seconds):
    worker = None
    while True:
        with lock:
            if not waiting:
                break
            task = waiting.popleft()
        left = deadline - time.monotonic()
        if left <= 0:
            rows, lost = task.without("the time of its stage was over"), None
        else:
            worker = worker or Worker()
            rows, lost = worker.do(task, min(seconds, left))
        if lost is not None:
            worker.end()
            worker = None
        with lock:
            if lost is not None and task.parts:
                waiting.extendleft(reversed(task.parts))
                continue
            rows = task.without(lost) if rows is None else rows
            note(rows if lost is None else [row | {"process lost": lost} for row in rows])
    if worker is not None:
        worker.end()

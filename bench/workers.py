"""Tasks in processes of their own: one that fails, hangs or ends its process loses itself alone.

An illegal access on a GPU stays with the process that made it, to its end: a process whose device
answers no more is replaced, and what it was about is done again, each part of it alone.
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
    """function(*arguments) -> rows of results, of importable names, for another process.

    about: what a row says that stands for it where there are none. parts: tasks to do in its place
    if the process is lost over it.
    """

    about: dict
    function: Callable
    arguments: tuple = ()
    parts: tuple = ()

    def without(self, why):
        """The rows that say why there are none, of each part where there are parts."""
        rows = [row for part in self.parts for row in part.without(why)]
        return rows or [self.about | {"not measured": why}]


class Worker:
    """A process that does one task after the other."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.begun = False

    def do(self, task, seconds):
        """(rows, None), or (rows so far or None, why the process is lost)."""
        try:
            # What it takes to begin is no task's time.
            self.begun = self.begun or self.pipe.recv()
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
    """The loop of a worker's process, to the end of the pipe."""
    import torch  # noqa: F401  (the longest part of beginning)

    pipe.send(True)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            rows = why = None
            try:
                rows = function(*arguments)
            except Exception as error:  # of whatever kind, it is a line of the results
                why = reason(error)
            pipe.send((rows, why, _device_error()))


def _device_error():
    """Why the device of this process answers no more, or None; else its memory is given back."""
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
    """note(rows) of every task, from as many processes; in order where there is one.

    deadline: of time.monotonic(), after which none begins. seconds: that a task may take. Each of
    several processes compiles and computes in one thread of its own.
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

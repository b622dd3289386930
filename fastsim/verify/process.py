"""Checks in processes of their own: one that crashes or hangs takes nothing with it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import NamedTuple

import torch

from fastsim.backends import panel
from fastsim.backends.torch import compiled
from fastsim.verify.verdicts import ASK, PRECISIONS

UNFINISHED = "did not finish"  # of a step that took longer than it may
# Of this process's own: verdicts hold for all, which have other settings.
OWN = ("FASTSIM_BACKEND", ASK, compiled.VARIABLE, panel.VARIABLE)
# What a process takes of a processor.
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


class Check(NamedTuple):
    """Of one backend, kind and dtype on a device; precision: of float32 products, "" for others."""

    backend: str
    kind: str
    dtype: torch.dtype
    device: torch.device
    precision: str


def results(part, checks, limit, module=None):
    """(reason to refuse it or None, ratio or None) of each check, all of them at once.

    part: of child.py. limit: seconds, after which a step counts as hanging. module: imported by the
    processes first.
    """
    with contextlib.ExitStack() as ends:
        begun = []
        for check in checks:
            errors = ends.enter_context(tempfile.TemporaryFile("w+"))
            begun.append(_Process(part, check, module, errors, _environment(len(checks))))
            ends.callback(begun[-1].end)
        return [process.result(limit) for process in begun]


class _Process:
    """One check in a process, begun; errors: an open file for what it says of them."""

    def __init__(self, part, check, module, errors, environment):
        backend, kind, dtype, device, precision = check
        command = [sys.executable, "-m", "fastsim.verify.child", part, backend, kind]
        command += [str(dtype).removeprefix("torch."), str(device), precision or PRECISIONS[0]]
        self._errors = errors
        self._process = subprocess.Popen(
            command + ([module] if module else []),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,  # so that what it has started ends with it
        )
        self._lines = queue.SimpleQueue()  # all that it says, then None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def result(self, limit):
        """Waits for what `results` gives of the check."""
        said = ""  # each line names the step that begins; the last one is the result
        try:
            while (line := self._lines.get(timeout=limit)) is not None:
                said = line.strip() or said
            self._process.wait(limit)
        except (queue.Empty, subprocess.TimeoutExpired):
            return f"a step {UNFINISHED} within {limit:g} s{_at(said)}", None
        if self._process.returncode:
            self._errors.seek(0)
            return _ending(self._process.returncode, self._errors.read()) + _at(said), None
        try:
            reason, ratio = json.loads(said)
        except ValueError:
            return f"its process ended without a result{_at(said)}", None
        return reason, ratio

    def end(self):
        """Ends the process, if it still runs, and all that it has started."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (AttributeError, ProcessLookupError):  # no groups here, or it has just ended
                self._process.kill()
            self._process.wait()


def cores():
    """Of the processor, as many as this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(together):
    """Of each of so many processes: it asks for no verdict, and has its share of the cores."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    if together > 1:
        for name in THREADS:
            environment.setdefault(name, str(max(1, cores() // together)))
    return environment


def _at(step):
    return f" ({step})" if step else ""


def _ending(code, errors):
    """How a process ended, as a sentence."""
    if code < 0:
        try:
            return f"its process was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was ended by signal {-code}"
    last = (errors.strip().splitlines() or [""])[-1]
    return f"its process ended with exit code {code}: {last}"[:300]

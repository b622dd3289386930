"""Runs checks in processes of their own, so that one that crashes or hangs harms no other."""

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

UNFINISHED = "did not finish"  # in the message for a step that exceeds its time limit
# Variables that a check does not inherit, as a verdict must not depend on them.
NOT_INHERITED = ("FASTSIM_BACKEND", ASK, compiled.VARIABLE, panel.VARIABLE)
# Variables for the number of threads of a process.
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


class Check(NamedTuple):
    """One backend, kind and dtype on a device; precision: of float32 products, else ""."""

    backend: str
    kind: str
    dtype: torch.dtype
    device: torch.device
    precision: str


def results(part, checks, limit, module=None):
    """[(reason to refuse the kernel or None, ratio or None)] of checks that run in parallel.

    part: as for child.py. limit: seconds after which a step counts as hanging. module: imported
    first by the processes.
    """
    with contextlib.ExitStack() as stack:
        processes = []
        for check in checks:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            processes.append(_Process(part, check, module, errors, _environment(len(checks))))
            stack.callback(processes[-1].end)
        return [process.result(limit) for process in processes]


class _Process:
    """A running process with one check; errors: an open file for its standard error."""

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
            start_new_session=True,  # so that `end` reaches its child processes
        )
        self._lines = queue.SimpleQueue()  # its lines of output, then None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def result(self, limit):
        """Wait for the result of the check, as in `results`."""
        last = ""  # a line names a step at its start; the last one is the result
        try:
            while (line := self._lines.get(timeout=limit)) is not None:
                last = line.strip() or last
            self._process.wait(limit)
        except (queue.Empty, subprocess.TimeoutExpired):
            return f"a step {UNFINISHED} within {limit:g} s{_at(last)}", None
        if self._process.returncode:
            self._errors.seek(0)
            return _ending(self._process.returncode, self._errors.read()) + _at(last), None
        try:
            reason, ratio = json.loads(last)
        except ValueError:
            return f"its process ended without a result{_at(last)}", None
        return reason, ratio

    def end(self):
        """End the process if it still runs, and its child processes."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (AttributeError, ProcessLookupError):  # no process groups, or it has just ended
                self._process.kill()
            self._process.wait()


def cores():
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(count):
    """The environment of one of `count` processes: it makes no verdicts and shares the cores."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    if count > 1:
        for name in THREADS:
            environment.setdefault(name, str(max(1, cores() // count)))
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

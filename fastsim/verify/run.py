"""Checks in processes of their own: one that crashes or hangs takes nothing with it."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import warnings

import torch

from fastsim.backends import get
from fastsim.verify import verdicts
from fastsim.verify.cases import KINDS

# Seconds of a step of a check, which may compile kernels: those of a whole check, up to 150, take
# minutes, so no limit of a check tells a slow processor from a kernel that hangs.
LIMIT = 300.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def verify(backend, kind, dtype, device, *, precision=None, limit=LIMIT, module=None):
    """Checks one backend, kind and dtype on a device, and keeps and returns the verdict.

    precision: of float32 products, as for `verdicts.key`. limit: seconds, after which a step counts
    as hanging. module: imported by the process first.
    """
    of = verdicts.key(backend, kind, dtype, device, precision)
    served, reason, ratio = _checked(backend, kind, dtype, device, of["precision"], limit, module)
    verdict = verdicts.now(served, reason, ratio, of)
    verdicts.write(verdict)
    if not served:
        warnings.warn(f"{backend} is not used for {kind} on {device}: {reason}", stacklevel=2)
    return verdict


def everything(device, backends, kinds=KINDS, dtypes=DTYPES):
    """The verdicts of these kinds and dtypes, of float32 at each precision, one after the other."""
    for backend in backends:
        for kind in kinds:
            if kind not in get(backend).kinds():
                continue
            for dtype in dtypes:
                for precision in verdicts.PRECISIONS if dtype == torch.float32 else ("",):
                    yield verify(backend, kind, dtype, device, precision=precision)


def _checked(backend, kind, dtype, device, precision, limit, module):
    """(served, reason, ratio)."""
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "fastsim.verify.child", backend, kind, name, str(device)]
    command.append(precision or verdicts.PRECISIONS[0])
    environment = {
        k: v for k, v in os.environ.items() if k not in ("FASTSIM_BACKEND", verdicts.ASK)
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command + ([module] if module else []),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,  # so that what it has started ends with it
        )
        said = ""  # each line names the step that begins; the last one is the result
        try:
            for line in _lines(process, limit):
                said = line.strip() or said
            process.wait(limit)
        except (queue.Empty, subprocess.TimeoutExpired):
            _end(process)
            return False, f"a step did not finish within {limit:g} s{_at(said)}", None
        errors.seek(0)
        if process.returncode:
            return False, _ending(process.returncode, errors.read()) + _at(said), None
    try:
        served, reason, ratio = json.loads(said)
    except ValueError:
        return False, f"its process ended without a result{_at(said)}", None
    return served, reason, ratio


def _lines(process, limit):
    """The lines that a process says; queue.Empty where one takes longer than `limit` seconds."""
    said = queue.SimpleQueue()

    def read():
        with process.stdout as lines:
            for line in lines:
                said.put(line)
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := said.get(timeout=limit)) is not None:
        yield line


def _at(step):
    return f" ({step})" if step else ""


def _end(process):
    """Ends a process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError):  # no groups here, or it has just ended
        process.kill()
    process.wait()


def _ending(code, errors):
    """How a process ended, as a sentence."""
    if code < 0:
        try:
            return f"its process was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was ended by signal {-code}"
    last = (errors.strip().splitlines() or [""])[-1]
    return f"its process ended with exit code {code}: {last}"[:300]

"""Checks in processes of their own: one that crashes or hangs takes nothing with it."""

import json
import os
import signal
import subprocess
import sys
import warnings

import torch

from fastsim.backends import get
from fastsim.verify import verdicts
from fastsim.verify.cases import KINDS

LIMIT = 300.0  # seconds of one check
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def verify(backend, kind, dtype, device, *, precision=None, limit=LIMIT, module=None):
    """Checks one backend, kind and dtype on a device, and keeps and returns the verdict.

    precision: of float32 products, as for `verdicts.key`. limit: seconds, after which it counts as
    hanging. module: imported by the process first.
    """
    of = verdicts.key(backend, kind, dtype, device, precision)
    served, reason, ratio = _checked(backend, kind, dtype, device, of["precision"], limit, module)
    verdict = verdicts.now(served, reason, ratio, of)
    verdicts.write(verdict)
    if not served:
        warnings.warn(f"{backend} is not used for {kind} on {device}: {reason}", stacklevel=2)
    return verdict


def everything(device, backends):
    """The verdicts of every kind and dtype, of float32 at each precision, one after the other."""
    for backend in backends:
        for kind in KINDS:
            if kind not in get(backend).kinds():
                continue
            for dtype in DTYPES:
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
    process = subprocess.Popen(
        command + ([module] if module else []),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # so that what it has started ends with it
    )
    try:
        out, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return False, f"it did not finish within {limit:g} s", None
    if process.returncode:
        return False, _ending(process.returncode, errors), None
    try:
        served, reason, ratio = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return False, "its process ended without a result", None
    return served, reason, ratio


def _end(process):
    """Ends a process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError):  # no groups here, or it has just ended
        process.kill()
    process.communicate()


def _ending(code, errors):
    """How a process ended, as a sentence."""
    if code < 0:
        try:
            return f"its process was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"its process was ended by signal {-code}"
    last = (errors.strip().splitlines() or [""])[-1]
    return f"its process ended with exit code {code}: {last}"[:300]

"""Checks the kernels on a device, and keeps the verdicts."""

import warnings

import torch

from fastsim.backends import get
from fastsim.verify import verdicts
from fastsim.verify.cases import KINDS
from fastsim.verify.process import UNFINISHED, Check, cores, results

# Seconds of a step of a check, which may compile kernels. A whole check compiles up to 150 kernels,
# so a limit for it could not tell a slow processor from a kernel that hangs.
LIMIT = 300.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Reasons that may be caused by another program on the machine. The kernel may still be correct, so
# the verdict is not kept. Triton needs a C compiler to launch.
TRANSIENT = (UNFINISHED, "out of memory", "alloc_failed", "busy or unavailable", "sigkill")
TRANSIENT += ("c compiler", "calledprocesserror", "no space left")
# Bytes of GPU memory that one check may need: the overhead of a process, matrices of 2,200 x 2,200
# in float64, and the largest size that is timed.
MEMORY = 3 << 30


def verify(backend, kind, dtype, device, *, precision=None, limit=LIMIT, module=None):
    """Check one backend, kind and dtype on a device, and keep and return the verdict.

    A verdict whose reason is one of `TRANSIENT` is kept only in this process.
    precision: of float32 products, as for `verdicts.key`. limit: seconds after which a step counts
    as hanging. module: imported first by the process.
    """
    if precision is None:
        precision = verdicts.precision_of(dtype, device)
    check = Check(backend, kind, dtype, device, precision)
    return _verdict(check, _refusal(check, limit, module), limit, module)


def checks_of(device, backends, kinds=KINDS, dtypes=DTYPES):
    """Yields the checks of these kinds and dtypes; float32 with each precision of products."""
    for backend in backends:
        for kind in kinds:
            if kind not in get(backend).kinds():
                continue
            for dtype in dtypes:
                for precision in verdicts.PRECISIONS if dtype == torch.float32 else ("",):
                    yield Check(backend, kind, dtype, device, precision)


def verdicts_of(checks, jobs):
    """Yields the verdicts of checks; jobs: how many run at a time, as most of it is compilation.

    Each kernel is timed while no other check runs.
    """
    for first in range(0, len(checks), jobs):
        group = checks[first : first + jobs]
        for check, (reason, _) in zip(group, results("refusal", group, LIMIT), strict=True):
            # Another check may be the cause, by its use of memory or time: check again alone.
            if reason is not None and len(group) > 1:
                reason = _refusal(check)
            yield _verdict(check, reason)


def most_at_once(device):
    """How many checks can run at a time with the cores and the memory here; at least one."""
    if device.type != "cuda":
        return cores()
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(cores(), free // MEMORY))


def _refusal(check, limit=LIMIT, module=None):
    """The reason to refuse a kernel, or None."""
    ((reason, _),) = results("refusal", [check], limit, module)
    return reason


def _verdict(check, reason, limit=LIMIT, module=None):
    """The verdict on a kernel with this reason to refuse it; with None it is timed first."""
    backend, kind, dtype, device, precision = check
    ratio = None
    if reason is None and device.type != "cpu":  # interpreted kernels have no speed
        ((reason, ratio),) = results("ratio", [check], limit, module)
    key = verdicts.key(backend, kind, dtype, device, precision)
    verdict = verdicts.now(reason is None, reason, ratio, key)
    transient = reason is not None and any(words in reason.lower() for words in TRANSIENT)
    verdicts.write(verdict, lasting=not transient)
    if reason is not None:
        warnings.warn(f"{backend} is not used for {kind} on {device}: {reason}", stacklevel=3)
    return verdict

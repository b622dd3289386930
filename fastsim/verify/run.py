"""Checks a device's kernels and keeps the verdicts."""

import warnings

import torch

from fastsim.backends import get
from fastsim.verify import verdicts
from fastsim.verify.cases import KINDS
from fastsim.verify.process import UNFINISHED, Check, cores, results

# Seconds of a step of a check, which may compile kernels: those of a whole check, up to 150, take
# minutes, so no limit of a check tells a slow processor from a kernel that hangs.
LIMIT = 300.0
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Reasons that another program on the device or the machine may have caused: the kernel may be right
# tomorrow, so the verdict is not kept. Triton needs a C compiler to launch.
TRANSIENT = (UNFINISHED, "out of memory", "alloc_failed", "busy or unavailable", "sigkill")
TRANSIENT += ("c compiler", "calledprocesserror", "no space left")
# Bytes of a GPU that one check may take: what belongs to a process, matrices of 2,200 x 2,200 in
# float64, and the largest size that is timed.
MEMORY = 3 << 30


def verify(backend, kind, dtype, device, *, precision=None, limit=LIMIT, module=None):
    """Checks one backend, kind and dtype on a device, and keeps and returns the verdict.

    A verdict whose reason is one of `TRANSIENT` is kept for this process only.
    precision: of float32 products, as for `verdicts.key`. limit: seconds, after which a step counts
    as hanging. module: imported by the process first.
    """
    if precision is None:
        precision = verdicts.precision_of(dtype, device)
    check = Check(backend, kind, dtype, device, precision)
    return _verdict(check, _refusal(check, limit, module), limit, module)


def checks_of(device, backends, kinds=KINDS, dtypes=DTYPES):
    """The checks of these kinds and dtypes, of float32 at each precision."""
    for backend in backends:
        for kind in kinds:
            if kind not in get(backend).kinds():
                continue
            for dtype in dtypes:
                for precision in verdicts.PRECISIONS if dtype == torch.float32 else ("",):
                    yield Check(backend, kind, dtype, device, precision)


def verdicts_of(checks, jobs):
    """The verdicts of checks, so many of which run at once: a check is compilation above all.

    Each is timed when no other process of this one runs.
    """
    for first in range(0, len(checks), jobs):
        some = checks[first : first + jobs]
        for check, (reason, _) in zip(some, results("refusal", some, LIMIT), strict=True):
            # Another process may have been the reason: it took the memory, or the time.
            if reason is not None and len(some) > 1:
                reason = _refusal(check)
            yield _verdict(check, reason)


def most_at_once(device):
    """How many checks this machine has the cores and the memory for, at least one."""
    if device.type != "cuda":
        return cores()
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(cores(), free // MEMORY))


def _refusal(check, limit=LIMIT, module=None):
    """The reason to refuse a kernel, or None."""
    ((reason, _),) = results("refusal", [check], limit, module)
    return reason


def _verdict(check, reason, limit=LIMIT, module=None):
    """Of a kernel with that reason to refuse it; where there is none, once it has been timed."""
    backend, kind, dtype, device, precision = check
    ratio = None
    if reason is None and device.type != "cpu":  # interpreted kernels have no speed
        ((reason, ratio),) = results("ratio", [check], limit, module)
    of = verdicts.key(backend, kind, dtype, device, precision)
    verdict = verdicts.now(reason is None, reason, ratio, of)
    transient = reason is not None and any(words in reason.lower() for words in TRANSIENT)
    verdicts.write(verdict, lasting=not transient)
    if reason is not None:
        warnings.warn(f"{backend} is not used for {kind} on {device}: {reason}", stacklevel=3)
    return verdict

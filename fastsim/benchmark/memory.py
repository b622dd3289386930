"""How far a call raises the peak memory of a fresh process.

CPU: the rise of the resident set's high-water mark over forward and backward, less the inputs,
which were there before, and the gradients, which are the result. The C allocator gives freed
blocks back to the system at once, so that the figure is what is alive and not what is kept for
later. GPU: the same of the memory that torch has handed out. One N x N float32 matrix at 16,384
is 1,024 MB (2^20 bytes).

The process is forked from a server that has imported the packages and done nothing else. It may
take so much memory beyond its own and no more, so that a call that wants too much fails
in it, and not the machine.
"""

import contextlib
import ctypes
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from fastsim.benchmark.baselines import BASELINES, baseline_named
from fastsim.benchmark.baselines.baseline import anywhere
from fastsim.benchmark.calls import reason, step
from fastsim.benchmark.cases import CASES, problem_in
from fastsim.benchmark.parent import end_with_parent
from fastsim.engine.one_call import in_panels

MIB, GIB = 2**20, 2**30


def usual_limit():
    """GB that a call may take on this machine: 16, or four fifths of all where that is less."""
    held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return min(16.0, round(0.8 * held, 1))


def rise(loss, name, rows, width, *, device="cpu", dtype="float32", limit=None):
    """MB (2^20) beyond inputs and gradients, or the sentence why there is no figure.

    name: of a baseline, or "fastsim <backend>". limit: bytes that the call may take.
    """
    return in_fresh_process(_rise, loss, name, rows, width, device, dtype, limit)


def in_fresh_process(function, *arguments):
    """What a function returns there, or the sentence why the process was ended."""
    try:
        with ProcessPoolExecutor(1, _context(), initializer=_begin) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        return "out of memory: the process was ended"


_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_DATA = 5  # the place in statm of what the process may write
_CLEAR, _STATUS, _STATM = (Path("/proc/self") / name for name in ("clear_refs", "status", "statm"))


def _begin():
    """In the process that measures, before all."""
    end_with_parent()
    _set_allocator()


def _set_allocator():
    """Freed blocks of a megabyte and more go back at once.

    An environment variable would do the same, but the server reads it, and another part of the
    program may have started that.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, MIB)
        library.malloc_trim(0)


def _context():
    methods = multiprocessing.get_all_start_methods()
    if "forkserver" not in methods:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    peers = {r.package for r in BASELINES.values() if r.unsupported_reason is anywhere}
    context.set_forkserver_preload(["fastsim.benchmark.memory", *peers])
    return context


@contextlib.contextmanager
def limited(limit, device="cpu"):
    """Within the block, no more than `limit` bytes beyond what is taken now (None: any)."""
    if limit is None or device != "cpu" or not _STATM.exists():
        yield
        return
    import resource

    # Not of all address space: the allocator may have reserved some of it for a thread.
    kept = resource.getrlimit(resource.RLIMIT_DATA)
    taken = int(_STATM.read_text().split()[_DATA]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (taken + limit, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, kept)


def _rise(loss, name, rows, width, device, dtype, limit):
    if device == "cpu" and not _CLEAR.exists():
        return "the peak of a process is known on Linux alone"
    case, baseline = CASES[loss], baseline_named(name)
    inputs = {"device": device, **problem_in(dtype)}
    measure = gpu_rise if device == "cuda" else resident_rise
    try:
        small = case.problem(128, width, **inputs)
        # So that what is loaded on the first call is there, that of large batches too. These come
        # first: the other call keeps what small batches of this signature come to.
        for passes in (in_panels(), contextlib.nullcontext()):
            with passes:
                step(baseline.call(small), small)
        problem = case.problem(rows, width, **inputs)
        call = baseline.call(problem)
        with limited(limit, device):
            bytes_ = measure(call, problem)
    except Exception as error:
        return reason(error)
    return round(bytes_ / MIB, 1)


def _gradient_bytes(problem):
    return sum(leaf.grad.nbytes for leaf in problem.leaves)


def resident_rise(call, problem):
    """Bytes beyond inputs and gradients that a call has of this process's memory at its peak."""
    # Making the inputs had a peak of its own: writing 5 brings the mark down to what is held now.
    _CLEAR.write_text("5")
    before = _high_water_mark()
    step(call, problem)
    return _high_water_mark() - before - _gradient_bytes(problem)


def _high_water_mark():
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def gpu_rise(call, problem):
    """Bytes beyond inputs and gradients that a call has of the GPU's memory at its peak."""
    for leaf in problem.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(call, problem)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - _gradient_bytes(problem)

"""Measures how far a call raises the peak memory of a fresh process.

CPU: the rise of the resident set's high-water mark over forward and backward. It leaves out the
inputs, which exist before, and the gradients, which are the result. The C allocator returns freed
blocks to the system at once, so the figure counts live memory, and none that is kept for later.
GPU: the rise of the memory that torch has allocated. One N x N float32 matrix at N = 16,384 takes
1,024 MB (of 2^20 bytes).

The process is forked from a server that has only imported the packages. Its memory is limited, so
that a call that wants too much fails there without exhausting the machine.
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
    """GB that a call may take on this machine: 16, or four fifths of its memory if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return min(16.0, round(0.8 * total, 1))


def rise(loss, name, rows, width, *, device="cpu", dtype="float32", limit=None):
    """MB (2^20 bytes) beyond inputs and gradients, or a sentence that says why there is no figure.

    name: of a baseline, or "fastsim <backend>". limit: the most bytes that the call may take.
    """
    return in_fresh_process(_rise, loss, name, rows, width, device, dtype, limit)


def in_fresh_process(function, *arguments):
    """The result of the function in a fresh process, or a sentence that says why there is none.

    The process does not start for a program that is read from standard input.
    """
    broken = "the process that measures did not start"
    try:
        with ProcessPoolExecutor(1, _context(), initializer=_prepare_process) as pool:
            pool.submit(os.getpid).result()
            broken = "out of memory: the process was ended"
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        return broken


_M_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt
_DATA = 5  # the field of statm with the writable memory of the process
_CLEAR, _STATUS, _STATM = (Path("/proc/self") / name for name in ("clear_refs", "status", "statm"))


def _prepare_process():
    """Runs first in the process that measures."""
    end_with_parent()
    _set_allocator()


def _set_allocator():
    """Makes the C allocator return freed blocks of a megabyte and more to the system at once.

    An environment variable would do the same, but it is read when the server starts, which another
    part of the program may have done.
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
    baselines = BASELINES.values()
    peers = {peer.package for peer in baselines if peer.unsupported_reason is anywhere}
    context.set_forkserver_preload(["fastsim.benchmark.memory", *peers])
    return context


@contextlib.contextmanager
def limited(limit, device="cpu"):
    """A context in which this process may take at most `limit` more bytes; None: any number."""
    if limit is None or device != "cpu" or not _STATM.exists():
        yield
        return
    import resource

    # Not a limit of the address space, of which the allocator may have reserved some for a thread.
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(_STATM.read_text().split()[_DATA]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous)


def _rise(loss, name, rows, width, device, dtype, limit):
    if device == "cpu" and not _CLEAR.exists():
        return "the peak of a process is known on Linux alone"
    case, baseline = CASES[loss], baseline_named(name)
    options = {"device": device, **problem_in(dtype)}
    measure = gpu_rise if device == "cuda" else resident_rise
    try:
        small = case.problem(128, width, **options)
        # First calls load code: that for large batches (in panels) and that for small ones. Panels
        # come first, as the other call keeps a plan for small batches of this signature.
        for passes in (in_panels(), contextlib.nullcontext()):
            with passes:
                step(baseline.call(small), small)
        problem = case.problem(rows, width, **options)
        call = baseline.call(problem)
        with limited(limit, device):
            raised_bytes = measure(call, problem)
    except Exception as error:
        return reason(error)
    return round(raised_bytes / MIB, 1)


def _gradient_bytes(problem):
    return sum(leaf.grad.nbytes for leaf in problem.leaves)


def resident_rise(call, problem):
    """Bytes beyond inputs and gradients by which a call raises the peak of the resident set."""
    # Making the inputs had a peak of its own. Writing 5 lowers the mark to the present size.
    _CLEAR.write_text("5")
    before = _high_water_mark()
    step(call, problem)
    return _high_water_mark() - before - _gradient_bytes(problem)


def _high_water_mark():
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def gpu_rise(call, problem):
    """Bytes beyond inputs and gradients by which a call raises the peak of torch's GPU memory."""
    for leaf in problem.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(call, problem)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - _gradient_bytes(problem)

"""Times and peak memory on a GPU, in turns with what a user would pick instead."""

import functools
import math

import torch
from torch.nn.functional import normalize

from bench.gpu_checks import narrowed
from fastsim.benchmark import ceilings
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.calls import reason, runnable
from fastsim.benchmark.cases import CASES, POSITIVE_COSINE, Problem
from fastsim.benchmark.memory import MIB, gpu_rise
from fastsim.benchmark.run import Session
from fastsim.benchmark.timing import in_turns, summary

BOTH = "forward + backward"
SQUARES = (8192, 16384)  # rows of the library's square products whose rate is the ceiling
FEW = 4096  # anchors of the call that compiles the kernels of the largest call


@functools.cache
def session(settings):
    """The `Session` of this process with these settings, which knows times and failures so far."""
    return Session(settings)


def ceiling(device, squares=SQUARES):
    """Result rows of square products in 16 bits (float32 on a CPU), and of the other ceilings."""
    dtypes = (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float32,)
    wait = torch.cuda.synchronize if device == "cuda" else bool
    result = []
    for rows in squares:
        for dtype in dtypes:
            a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in "ab")
            times = in_turns({"": lambda a=a, b=b: (a @ b, wait())}, seconds=0.5)[""]
            row = {"measure": "ceiling", "name": "square product", "rows": rows}
            row |= {"dtype": str(dtype).removeprefix("torch."), **summary(times)}
            result.append(row | {"GFLOP/s": 2 * rows**3 / (1e6 * min(row["repeats ms"]))})
    machine = ceilings.machine_rows(device=device, seconds=0.5)
    return result + [{"measure": "ceiling"} | row for row in machine]


def products(settings, rows, width):
    """The row of the library's three products of an exact loss at one size."""
    return session(settings).products(rows, width)


def contest(settings, loss, rows, names=None):
    """Rows of time and memory of a loss at one size. names: of contestants; None: all."""
    case = CASES[loss]
    (width,) = settings.dims_of(case)
    result = session(settings).time(case, rows, width, names)
    timed = [row["implementation"] for row in result if "repeats ms" in row]
    if settings.device == "cuda":
        problem = case.problem(rows, width, **settings.problem_options)
        for name in timed:
            common = {"measure": "memory", "loss": loss, "implementation": name, "rows": rows}
            common |= {"width": width, "dtype": settings.dtype_name}
            try:
                rise = gpu_rise(baseline_named(name).call(problem), problem)
                result.append(common | {"rise MB": round(rise / MIB, 1)})
            except Exception as error:
                result.append(common | {"not measured": reason(error)})
    return result


def compile_ahead(settings, loss, rows, names):
    """Compiles kernels, which the process that times them finds on disk; returns no rows."""
    contest(settings, loss, rows, names)
    return []


def largest(settings, name, rows):
    """Rows of time and memory of info_nce at a size whose score matrix would not fit in memory."""
    case, device = CASES["info_nce"], settings.device
    (width,) = settings.dims_of(case)
    dtype, autocast = settings.problem_options["dtype"], settings.problem_options.get("autocast")
    x, y = (torch.randn(rows, width, device=device, dtype=dtype) for _ in "xy")
    # In place: float32 copies of a million rows are gigabytes.
    y.mul_(1 / math.sqrt(width)).add_(normalize(x, dim=1), alpha=POSITIVE_COSINE)
    leaves = [x.requires_grad_(), y.requires_grad_()]
    problem = Problem(case, leaves, (), dict(case.options), autocast)
    call = baseline_named(name).call(problem)
    few = narrowed(problem, FEW)
    runnable(call, few, BOTH)()
    del few
    common = {"loss": case.name, "implementation": name, "rows": rows, "width": width}
    common |= {"dtype": settings.dtype_name}
    times = in_turns({name: runnable(call, problem, BOTH)}, seconds=0, fewest=1, cold=(name,))
    times = times[name]
    if not isinstance(times, list):
        return [{"measure": "time", "pass": BOTH, **common, "not measured": times}]
    row = {"measure": "time", "pass": BOTH, **common, **summary(times)}
    row["GFLOP/s"] = float(f"{case.flop(rows, width) / (1e9 * min(times)):.5g}")
    result = [row]
    if device == "cuda":
        rise = round(gpu_rise(call, problem) / MIB, 1)
        result.append({"measure": "memory", **common, "rise MB": rise})
    return result

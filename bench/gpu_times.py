"""Times and peak memory on a GPU, beside what a user would pick instead, in turns."""

import functools
import math

import torch
from torch.nn.functional import normalize

from bench.gpu_checks import narrowed
from fastsim.benchmark import ceilings
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.calls import reason, runnable
from fastsim.benchmark.cases import ALIKE, CASES, Problem
from fastsim.benchmark.memory import MIB, gpu_rise
from fastsim.benchmark.run import Session
from fastsim.benchmark.timing import in_turns, summary

BOTH = "forward + backward"
SQUARES = (8192, 16384)  # rows of the library's product whose rate is the ceiling
FEW = 4096  # anchors of the call that compiles what the largest call needs


@functools.cache
def session(settings):
    """What a process has learnt with these settings: how long calls take, what does not work."""
    return Session(settings)


def ceiling(device, squares=SQUARES):
    """Rows of the library's square products in 16 bits (float32 on a CPU), and of a copy."""
    kinds = (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float32,)
    wait = torch.cuda.synchronize if device == "cuda" else bool
    found = []
    for rows in squares:
        for dtype in kinds:
            a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in "ab")
            times = in_turns({"": lambda a=a, b=b: (a @ b, wait())}, seconds=0.5)[""]
            row = {"measure": "ceiling", "name": "square product", "rows": rows}
            row |= {"dtype": str(dtype).removeprefix("torch."), **summary(times)}
            found.append(row | {"GFLOP/s": 2 * rows**3 / (1e6 * min(row["repeats ms"]))})
    machine = ceilings.machine_rows(device=device, seconds=0.5)
    return found + [{"measure": "ceiling"} | row for row in machine]


def products(settings, rows, width):
    """The row of the library's three products of an exact loss at one size."""
    return session(settings).products(rows, width)


def contest(settings, loss, rows, names=None):
    """Rows of time and memory of a loss at one size; names: of contestants, all of them."""
    case, kept = CASES[loss], session(settings)
    (width,) = settings.dims_of(case)
    found = kept.time(case, rows, width, names)
    timed = [row["implementation"] for row in found if "repeats ms" in row]
    if settings.device == "cuda":
        problem = case.problem(rows, width, **settings.inputs)
        for name in timed:
            common = {"measure": "memory", "loss": loss, "implementation": name, "rows": rows}
            common |= {"width": width, "dtype": settings.numbers}
            try:
                rise = gpu_rise(baseline_named(name).call(problem), problem)
                found.append(common | {"rise MB": round(rise / MIB, 1)})
            except Exception as error:
                found.append(common | {"not measured": reason(error)})
    return found


def compile_ahead(settings, loss, rows, names):
    """No rows: what is compiled here is found on the disk by the process that times it."""
    contest(settings, loss, rows, names)
    return []


def largest(settings, name, rows):
    """Rows of time and memory of info_nce at a size that no matrix of scores would fit."""
    case, device = CASES["info_nce"], settings.device
    (width,) = settings.dims_of(case)
    dtype, autocast = settings.inputs["dtype"], settings.inputs.get("autocast")
    x, y = (torch.randn(rows, width, device=device, dtype=dtype) for _ in "xy")
    # In place: float32 copies of a million rows are gigabytes.
    y.mul_(1 / math.sqrt(width)).add_(normalize(x, dim=1), alpha=ALIKE)
    leaves = [x.requires_grad_(), y.requires_grad_()]
    problem = Problem(case, leaves, (), dict(case.options), autocast)
    call = baseline_named(name).call(problem)
    few = narrowed(problem, FEW)
    runnable(call, few, BOTH)()
    del few
    common = {"loss": case.name, "implementation": name, "rows": rows, "width": width}
    common |= {"dtype": settings.numbers}
    times = in_turns({name: runnable(call, problem, BOTH)}, seconds=0, fewest=1, warm_up=False)
    times = times[name]
    if not isinstance(times, list):
        return [{"measure": "time", "pass": BOTH, **common, "not measured": times}]
    row = {"measure": "time", "pass": BOTH, **common, **summary(times)}
    row["GFLOP/s"] = float(f"{case.flop(rows, width) / (1e9 * min(times)):.5g}")
    found = [row]
    if device == "cuda":
        rise = round(gpu_rise(call, problem) / MIB, 1)
        found.append({"measure": "memory", **common, "rise MB": rise})
    return found

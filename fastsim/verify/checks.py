"""One backend, kind and dtype on one device: right, the same every time, and how fast.

Value and every gradient against float64; the error may be twice that of the torch backend at the
same precision, and a rounding of the largest entry; or what rounding the rows' numbers amounts to.
"""

import contextlib
import statistics
import time

import torch

from fastsim.backends import get, panel
from fastsim.backends.torch import compiled
from fastsim.engine.one_call import in_panels
from fastsim.environment import variables
from fastsim.verify.canaries import canaries
from fastsim.verify.cases import problems
from fastsim.verify.outputs import by_columns, off_by_one, on_device, outputs
from fastsim.verify.rounding import SPREAD, moves

REPEATS = 20
WAYS = contextlib.nullcontext, in_panels  # a small batch may have kernels of its own
SMALL = ((16, 32, 64), (21, 45, 40))  # what an interpreter can do: aligned, ragged
DEPTHS = (64, 256, 320, 768, 832)  # 1, 4, 5, 12 and 13 steps of a product of 64
RAGGED = (333, 517, 200)
WIDE = (21, 8005, 40)  # as many columns as one program holds of a small batch
TALL = (270, 45, 40)  # of several panels, where these are as small as they can be
SMALLEST = "0.001"  # megabytes
TIMED = (1024, 4096, 16384)
WIDTH = 768


def shapes(backend, dtype, device):
    """(rows, columns, width) at which a backend is checked on a device."""
    if device.type == "cpu":
        return SMALL
    turning = get(backend).turning_widths(dtype, device)
    deep = [(129, 260, depth) for depth in (*DEPTHS, *turning)]
    deep += [(*RAGGED[:2], depth + 5) for depth in turning]
    return (*SMALL, (512, 1024, 256), RAGGED, *deep, (*_many_tiles(device), 96), WIDE)


def _many_tiles(device):
    """(rows, columns) of more tiles of 128 x 128 than two for each multiprocessor."""
    tiles = 2 * torch.cuda.get_device_properties(device).multi_processor_count + 1
    side = 128 * (int(tiles**0.5) + 1)
    return side, side + 7


def shapes_of_calls(backend, dtype, device):
    """(shape, what is tried of calls there): repeated where tiles and steps are under way together;
    where they write; with fewer gradients, on both sides of a turning width.
    """
    if device.type == "cpu":
        calls = _fault_of_repeats, _fault_of_writes, _fault_of_kinds_of_calls
        return [(SMALL[1], fault_of) for fault_of in calls]
    turning = get(backend).turning_widths(dtype, device)
    deep = (*RAGGED[:2], max(RAGGED[2], *turning) + 5)
    return [
        ((*_many_tiles(device), max(*DEPTHS, *turning)), _fault_of_repeats),
        (RAGGED, _fault_of_writes),
        (RAGGED, _fault_of_kinds_of_calls),
        (deep, _fault_of_kinds_of_calls),
    ]


def _nobody(step):
    """Ignores the name of the step."""


def faults(backend, kind, dtype, device, told=_nobody):
    """Sentences: the first thing that is wrong, or none. told: is given each step as it begins."""
    for step, problem, fault_of in _tried(backend, kind, dtype, device):
        for way in WAYS:
            told(step)
            with way():
                fault = fault_of(backend, problem, device)
            if fault:
                return [f"{step}: {fault}"]
    return _faults_of_panels(backend, served(backend, kind, TALL, dtype), device, told)


def _tried(backend, kind, dtype, device):
    """(name of the step, problem, what is tried of it)."""
    for shape in shapes(backend, dtype, device):
        for problem in served(backend, kind, shape, dtype):
            yield f"{problem.name} at {' x '.join(map(str, shape))}", problem, _fault
    for shape, fault_of in shapes_of_calls(backend, dtype, device):
        for problem in served(backend, kind, shape, dtype):
            yield f"calls of {problem.name} at {' x '.join(map(str, shape))}", problem, fault_of


def served(backend, kind, shape, dtype):
    """The problems of a kind but for those with an extra that the backend has not."""
    made = problems(kind, shape, dtype)
    return [one for one in made if get(backend).unsupported_extra(one.extras) is None]


def _fault(backend, problem, device):
    """What is wrong with the value or a gradient."""
    problem = on_device(problem, device)
    got = outputs(problem, backend, device)
    if not problem.finite:
        return None if not got[0].isfinite().all() else "a NaN did not reach the loss"
    return _difference(got, problem, device, *_expected(problem, device))


def _expected(problem, device):
    """(outputs in float64, those of the torch backend)."""
    truth = outputs(problem, problem.exact, device, torch.float64)
    return truth, outputs(problem, "torch", device)


def _difference(got, problem, device, truth, theirs):
    """What of `got` is farther from the truth than it may be; None in the place of what nobody
    wanted.
    """
    dtype = problem.leaves[0].dtype
    names = ["the value", *(f"gradient {i}" for i in range(len(problem.leaves))), *problem.learnt]
    moved = None
    for place, name in enumerate(names):
        mine, other, right = got[place], theirs[place], truth[place]
        if mine is None:
            continue
        if not mine.isfinite().all():
            return f"{name} is not finite"
        error, allowed = ((each.double() - right).abs().max().item() for each in (mine, other))
        kind = dtype if name.startswith("gradient") else torch.float32
        if name in problem.learnt and dtype.itemsize == 2:
            kind = torch.float16  # the type of the score gradients that it is a sum of
        largest = right.abs().max().item()
        if name == "the value" and dtype.itemsize > 2:
            # A small value is a difference of larger numbers. Of 16-bit rows it is off by more than
            # that in the torch backend, too.
            largest = max(1.0, largest)
        if error <= 2 * (allowed + torch.finfo(kind).eps * largest):
            continue
        if moved is None:  # hardly ever asked for
            moved = moves(problem, outputs, truth, dtype, device)
        if error > SPREAD * moved[place]:
            return f"{name} is off by {error:.3g}, the torch backend by {allowed:.3g}"
    return None


def _fault_of_repeats(backend, problem, device):
    """What shows in how often and where a call is made."""
    if not problem.finite:
        return None  # a NaN is equal to nothing
    problem = on_device(problem, device)
    first = outputs(problem, backend, device)
    for _ in range(REPEATS if device.type != "cpu" else 1):  # nothing there runs at once
        if not _equal(first, outputs(problem, backend, device)):
            return "two calls with the same inputs gave different bits"
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            again = outputs(problem, backend, device)
        stream.synchronize()
        if not _equal(first, again):
            return "on a second stream it gave different bits"
        other = _second(device)
        if other is not None:
            try:
                there = [part.to(device) for part in outputs(problem, backend, other)]
            except torch.OutOfMemoryError:  # which says nothing of this device
                return None
            if not _equal(first, there):
                return "on a second device it gave different bits"
    return None


def _second(device):
    """Another device of the same kind, or None; one that another program has for itself is none."""
    count = torch.cuda.device_count()
    other = torch.device("cuda", ((device.index or 0) + 1) % count)
    if count == 1 or torch.cuda.get_device_name(other) != torch.cuda.get_device_name(device):
        return None
    try:
        torch.empty(1, device=other)
    except RuntimeError:
        return None
    return other


def _fault_of_kinds_of_calls(backend, problem, device):
    """What shows without gradients or with one side's alone, and in rows that lie otherwise."""
    if not problem.finite:
        return None
    problem = on_device(problem, device)
    expected = _expected(problem, device)
    calls = [((), off_by_one), ((0,), by_columns), ((1,), off_by_one)]
    for wanted, laid in calls[: 1 + len(problem.leaves)]:
        got = outputs(problem, backend, device, wanted=wanted, laid=laid)
        fault = _difference(got, problem, device, *expected)
        if fault:
            asked = f"of argument {wanted[0] + 1} alone" if wanted else "of nothing"
            return f"with gradients {asked} and rows laid {laid.__name__}, {fault}"
    return None


def _fault_of_writes(backend, problem, device):
    """What shows in the memory around what a call makes."""
    problem = on_device(problem, device)
    with canaries() as broken:
        outputs(problem, backend, device)
        if count := broken():
            return f"it wrote outside {count} of its tensors"
    return None


def _faults_of_panels(backend, made, device, told):
    """What shows where scores are computed again, panel after panel, rather than kept."""
    with variables({panel.VARIABLE: SMALLEST}):
        for problem in made if device.type != "cpu" else made[:1]:
            step = f"{problem.name} over several panels"
            told(step)
            fault = _fault(backend, problem, device)
            if fault:
                return [f"{step}: {fault}"]
    return []


def _equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ratio(backend, kind, dtype, device, told=_nobody):
    """Time of forward and backward over that of the torch backend, the mean over the sizes."""
    ratios = []
    for step, problem in _timed(kind, dtype):
        told(f"the time of {step}")
        ratios.append(_ratio(on_device(problem, device), backend, device))
    return statistics.geometric_mean(ratios)


def _timed(kind, dtype):
    """(name, problem) of every size that is timed."""
    for rows in TIMED:
        yield f"{rows} rows", problems(kind, (rows, rows, WIDTH), dtype)[0]


def _ratio(problem, backend, device, rounds=7):
    """Of the medians of times that are taken in turns, since a device's clock goes up and down."""
    times = {backend: [], "torch": []}
    for _ in range(rounds + 2):
        for name, found in times.items():
            found.append(_time(problem, name, device))
    mine, theirs = (statistics.median(times[name][2:]) for name in (backend, "torch"))
    return mine / theirs


def _time(problem, backend, device):
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    outputs(problem, backend, device)
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def refusal(backend, kind, dtype, device, told=_nobody):
    """Why a backend is not to be used on a device for a kind and a dtype, a sentence, or None.

    told: as of `faults`.
    """
    reason = get(backend).unsupported_reason(
        torch.empty(1, 1, dtype=dtype, device=device), kind=kind
    )
    if reason is not None:
        return reason
    # The backend to compare with compiles where it is timed: here it would for every option.
    with variables({compiled.VARIABLE: "0"}):
        found = faults(backend, kind, dtype, device, told)
    if found:
        return found[0]
    if device.type != "cpu":  # what is compiled here, beside other checks, is there to be timed
        for step, problem in _timed(kind, dtype):
            for name in (backend, "torch"):
                told(f"compilation for {step} ({name})")
                outputs(problem, name, device)
    return None

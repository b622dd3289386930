"""Checks one backend, kind and dtype on one device: correct, reproducible, and how fast.

The value and every gradient are compared with float64. The error may be twice that of the torch
backend at the same precision plus a rounding of the largest entry, or the effect of rounding the
rows (rounding.py).
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
from fastsim.verify.outputs import by_columns, on_device, outputs, unaligned
from fastsim.verify.rounding import SPREAD, moves

REPEATS = 20
PATHS = contextlib.nullcontext, in_panels  # small batches may have their own kernels
SMALL = ((16, 32, 64), (21, 45, 40))  # aligned and ragged, small enough for an interpreter
DEPTHS = (64, 256, 320, 768, 832)  # 1, 4, 5, 12 and 13 steps of 64 of a product
RAGGED = (333, 517, 200)
WIDE = (21, 8005, 40)  # about the most columns of a small batch that one program holds
TALL = (270, 45, 40)  # several panels of the smallest size
SMALLEST_PANEL = "0.001"  # megabytes
TIMED = (1024, 4096, 16384)
WIDTH = 768


def shapes(backend, dtype, device):
    """The shapes (rows, columns, width) with which a backend is checked on a device."""
    if device.type == "cpu":
        return SMALL
    turning = get(backend).turning_widths(dtype, device)
    deep = [(129, 260, depth) for depth in (*DEPTHS, *turning)]
    deep += [(*RAGGED[:2], depth + 5) for depth in turning]
    return (*SMALL, (512, 1024, 256), RAGGED, *deep, (*_many_tiles(device), 96), WIDE)


def _many_tiles(device):
    """(rows, columns) that make more than two tiles of 128 x 128 per multiprocessor."""
    tiles = 2 * torch.cuda.get_device_properties(device).multi_processor_count + 1
    side = 128 * (int(tiles**0.5) + 1)
    return side, side + 7


def shapes_of_calls(backend, dtype, device):
    """[(shape, check)] of the checks that concern calls.

    Repeated calls, with many tiles at a time; writes outside of tensors; calls with fewer gradients
    and other layouts, below and above a turning width.
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


def _ignore(step):
    """Reports no steps."""


def faults(backend, kind, dtype, device, report=_ignore):
    """A list with the first fault as a sentence, or an empty one.

    report: a function of one line of text, called at the start of each step.
    """
    for step, problem, fault_of in _steps(backend, kind, dtype, device):
        for path in PATHS:
            report(step)
            with path():
                fault = fault_of(backend, problem, device)
            if fault:
                return [f"{step}: {fault}"]
    return _faults_of_panels(backend, supported(backend, kind, TALL, dtype), device, report)


def _steps(backend, kind, dtype, device):
    """Yields (name of the step, problem, check)."""
    for shape in shapes(backend, dtype, device):
        for problem in supported(backend, kind, shape, dtype):
            yield f"{problem.name} at {' x '.join(map(str, shape))}", problem, _fault
    for shape, fault_of in shapes_of_calls(backend, dtype, device):
        for problem in supported(backend, kind, shape, dtype):
            yield f"calls of {problem.name} at {' x '.join(map(str, shape))}", problem, fault_of


def supported(backend, kind, shape, dtype):
    """The problems of a kind whose extras the backend supports."""
    return [
        problem
        for problem in problems(kind, shape, dtype)
        if get(backend).unsupported_extra(problem.extras) is None
    ]


def _fault(backend, problem, device):
    """What is wrong with the value or a gradient, or None."""
    problem = on_device(problem, device)
    got = outputs(problem, backend, device)
    if not problem.finite:
        return None if not got[0].isfinite().all() else "a NaN did not reach the loss"
    return _difference(got, problem, device, *_expected(problem, device))


def _expected(problem, device):
    """(outputs in float64, those of the torch backend)."""
    truth = outputs(problem, problem.exact, device, torch.float64)
    return truth, outputs(problem, "torch", device)


def _difference(got, problem, device, truth, torch_outputs):
    """Which output in `got` is too far from the truth, or None; skips outputs that are None."""
    dtype = problem.leaves[0].dtype
    names = ["the value", *(f"gradient {i}" for i in range(len(problem.leaves))), *problem.learnt]
    moved = None
    for place, name in enumerate(names):
        output, exact = got[place], truth[place]
        if output is None:
            continue
        if not output.isfinite().all():
            return f"{name} is not finite"
        error, torch_error = (
            (each.double() - exact).abs().max().item() for each in (output, torch_outputs[place])
        )
        rounding = dtype if name.startswith("gradient") else torch.float32
        if name in problem.learnt and dtype.itemsize == 2:
            rounding = torch.float16  # the dtype of the score gradients that are summed
        largest = exact.abs().max().item()
        if name == "the value" and dtype.itemsize > 2:
            # A small value is a difference of larger numbers. With 16-bit rows the torch backend
            # has a larger error anyway.
            largest = max(1.0, largest)
        if error <= 2 * (torch_error + torch.finfo(rounding).eps * largest):
            continue
        if moved is None:  # expensive, and rarely needed
            moved = moves(problem, outputs, truth, dtype, device)
        if error > SPREAD * moved[place]:
            return f"{name} has an error of {error:.3g}, the torch backend of {torch_error:.3g}"
    return None


def _fault_of_repeats(backend, problem, device):
    """What is wrong with repeated calls, or with calls on another stream or device; or None."""
    if not problem.finite:
        return None  # NaN is not equal to itself
    problem = on_device(problem, device)
    first = outputs(problem, backend, device)
    for _ in range(REPEATS if device.type != "cpu" else 1):  # a CPU runs no tiles in parallel here
        if not _equal(first, outputs(problem, backend, device)):
            return "two calls with the same inputs gave different results"
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            again = outputs(problem, backend, device)
        stream.synchronize()
        if not _equal(first, again):
            return "a call on a second stream gave different results"
        other = _other_device(device)
        if other is not None:
            try:
                elsewhere = [part.to(device) for part in outputs(problem, backend, other)]
            except torch.OutOfMemoryError:  # no fault of this device
                return None
            if not _equal(first, elsewhere):
                return "a call on a second device gave different results"
    return None


def _other_device(device):
    """Another device of the same model, or None if there is none or it cannot be used."""
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
    """What is wrong without gradients, with those of one side, or with other layouts; or None."""
    if not problem.finite:
        return None
    problem = on_device(problem, device)
    expected = _expected(problem, device)
    calls = [((), unaligned), ((0,), by_columns), ((1,), unaligned)]
    for with_grad, layout in calls[: 1 + len(problem.leaves)]:
        got = outputs(problem, backend, device, with_grad=with_grad, layout=layout)
        fault = _difference(got, problem, device, *expected)
        if fault:
            gradients = f"only of argument {with_grad[0] + 1}" if with_grad else "none"
            return f"with gradients {gradients} and layout {layout.__name__}, {fault}"
    return None


def _fault_of_writes(backend, problem, device):
    """Whether a call writes outside of the tensors that it creates; or None."""
    problem = on_device(problem, device)
    with canaries() as broken:
        outputs(problem, backend, device)
        if count := broken():
            return f"it wrote outside of {count} of its tensors"
    return None


def _faults_of_panels(backend, problems_, device, report):
    """As `faults`, with small panels: scores are then computed again instead of kept."""
    with variables({panel.VARIABLE: SMALLEST_PANEL}):
        for problem in problems_ if device.type != "cpu" else problems_[:1]:
            step = f"{problem.name} over several panels"
            report(step)
            fault = _fault(backend, problem, device)
            if fault:
                return [f"{step}: {fault}"]
    return []


def _equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ratio(backend, kind, dtype, device, report=_ignore):
    """Time of forward and backward divided by that of the torch backend, the mean over sizes."""
    ratios = []
    for step, problem in _timed(kind, dtype):
        report(f"the time of {step}")
        ratios.append(_ratio(on_device(problem, device), backend, device))
    return statistics.geometric_mean(ratios)


def _timed(kind, dtype):
    """Yields (name, problem) of every size that is timed."""
    for rows in TIMED:
        yield f"{rows} rows", problems(kind, (rows, rows, WIDTH), dtype)[0]


def _ratio(problem, backend, device, rounds=7):
    """The ratio of median times. The backends take turns, as the clock rate of a device varies."""
    times = {backend: [], "torch": []}
    for _ in range(rounds + 2):
        for name, seconds in times.items():
            seconds.append(_time(problem, name, device))
    ours, torch_time = (statistics.median(times[name][2:]) for name in (backend, "torch"))
    return ours / torch_time


def _time(problem, backend, device):
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    outputs(problem, backend, device)
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def refusal(backend, kind, dtype, device, report=_ignore):
    """Why a backend must not be used on a device for a kind and a dtype, as a sentence, or None.

    report: as for `faults`.
    """
    reason = get(backend).unsupported_reason(
        torch.empty(1, 1, dtype=dtype, device=device), kind=kind
    )
    if reason is not None:
        return reason
    # The torch backend is compiled only for timing: here it would be compiled for every option.
    with variables({compiled.VARIABLE: "0"}):
        first = faults(backend, kind, dtype, device, report)
    if first:
        return first[0]
    if device.type != "cpu":  # compile what will be timed while other checks still run
        for step, problem in _timed(kind, dtype):
            for name in (backend, "torch"):
                report(f"compilation for {step} ({name})")
                outputs(problem, name, device)
    return None

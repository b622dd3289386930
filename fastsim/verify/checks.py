"""One backend, kind and dtype on one device: right, the same every time, and how fast.

Value and every gradient against float64; the error may be twice that of the torch backend at the
same precision, and a rounding of the largest entry; or what rounding the rows' numbers amounts to.
"""

import contextlib
import statistics
import time
from dataclasses import replace

import torch

from fastsim.backends import get, panel
from fastsim.backends.torch import compiled
from fastsim.engine.one_call import in_panels
from fastsim.environment import variables
from fastsim.verify.canaries import canaries
from fastsim.verify.cases import problems
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
    """The shapes at which calls are repeated, where tiles and steps are under way together, and at
    which it is seen where they write.
    """
    if device.type == "cpu":
        return SMALL[1], SMALL[1]
    widest = max(*DEPTHS, *get(backend).turning_widths(dtype, device))
    return (*_many_tiles(device), widest), RAGGED


def _nobody(step):
    """Ignores the name of the step."""


def faults(backend, kind, dtype, device, told=_nobody):
    """Sentences: the first thing that is wrong, or none. told: is given each step as it begins."""
    for shape in shapes(backend, dtype, device):
        for problem in served(backend, kind, shape, dtype):
            step = f"{problem.name} at {' x '.join(map(str, shape))}"
            for way in WAYS:
                told(step)
                with way():
                    fault = _fault(backend, problem, dtype, device)
                if fault:
                    return [f"{step}: {fault}"]
    places = shapes_of_calls(backend, dtype, device)
    for shape, fault_of in zip(places, (_fault_of_repeats, _fault_of_writes), strict=True):
        for problem in served(backend, kind, shape, dtype):
            step = f"calls of {problem.name} at {' x '.join(map(str, shape))}"
            for way in WAYS:
                told(step)
                with way():
                    fault = fault_of(backend, problem, device)
                if fault:
                    return [f"{step}: {fault}"]
    return _faults_of_panels(backend, served(backend, kind, TALL, dtype), device, told)


def served(backend, kind, shape, dtype):
    """The problems of a kind but for those with an extra that the backend has not."""
    made = problems(kind, shape, dtype)
    return [one for one in made if get(backend).unsupported_extra(one.extras) is None]


def _fault(backend, problem, dtype, device):
    problem = on_device(problem, device)
    got = outputs(problem, backend, device)
    if not problem.finite:
        return None if not got[0].isfinite().all() else "a NaN did not reach the loss"
    truth = outputs(problem, problem.exact, device, torch.float64)
    theirs = outputs(problem, "torch", device)
    names = ["the value", *(f"gradient {i}" for i in range(len(problem.leaves))), *problem.learnt]
    moved = None
    for place, name in enumerate(names):
        mine, other, right = got[place], theirs[place], truth[place]
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
        if torch.cuda.device_count() > 1:
            other = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
            same = torch.cuda.get_device_name(other) == torch.cuda.get_device_name(device)
            there = [part.to(device) for part in outputs(problem, backend, other)]
            if same and not _equal(first, there):
                return "on a second device it gave different bits"
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
            fault = _fault(backend, problem, problem.leaves[0].dtype, device)
            if fault:
                return [f"{step}: {fault}"]
    return []


def _equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def on_device(problem, device, dtype=None):
    """The problem with its tensors on a device, those of floating point in that dtype."""

    def there(value):
        if callable(value):
            value = value()
        if isinstance(value, torch.Tensor):
            wide = dtype is not None and value.is_floating_point()
            return value.to(device, dtype if wide else value.dtype)
        return tuple(map(there, value)) if isinstance(value, tuple) else value

    return replace(
        problem,
        leaves=[there(leaf) for leaf in problem.leaves],
        given=tuple(map(there, problem.given)),
        options={name: there(value) for name, value in problem.options.items()},
    )


def outputs(problem, backend, device, dtype=None):
    """[value, gradients of the leaves, gradients of the learnt options]."""
    problem = on_device(problem, device, dtype)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.leaves]
    compute = torch.promote_types(leaves[0].dtype, torch.float32)
    learnt = {
        name: torch.full((), value, dtype=compute, device=device, requires_grad=True)
        for name, value in problem.learnt.items()
    }
    value = problem.loss(*leaves, *problem.given, **problem.options, **learnt, backend=backend)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=device)
    (value * weights.view(value.shape)).sum().backward()
    return [value.detach(), *(t.grad for t in (*leaves, *learnt.values()))]


def ratio(backend, kind, dtype, device, told=_nobody):
    """Time of forward and backward over that of the torch backend, the mean over the sizes."""
    ratios = []
    for step, problem in _timed(kind, dtype):
        told(f"the time of {step}")
        ratios.append(_time(problem, backend, device) / _time(problem, "torch", device))
    return statistics.geometric_mean(ratios)


def _timed(kind, dtype):
    """(name, problem) of every size that is timed."""
    for rows in TIMED:
        yield f"{rows} rows", problems(kind, (rows, rows, WIDTH), dtype)[0]


def _time(problem, backend, device, rounds=7):
    problem, times = on_device(problem, device), []
    for _ in range(rounds + 2):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        outputs(problem, backend, device)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


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

"""python -m bench.host_time: the time of a step on the host, measured without a GPU.

For a small batch this is most of the time on a GPU: launches, the torch calls between them, and
Python. For the Triton backend kernels are compiled for an architecture, and none is executed: where
Triton would call the driver, an empty function is called, and library products are left out. The
tensors are on the CPU and narrow, so that torch calls take little more than their overhead; on a
GPU each would also launch a kernel. A step is forward + backward in one thread:

launches, calls: Triton kernels launched, and calls of torch operators that are not inside others
ms: the best of several rounds, and the part of it inside Triton's launcher

The torch backend, which `auto` takes on a GPU without a verdict, is measured at the fewest rows,
with its arithmetic on the CPU.

Writes host_time.jsonl in bench/results/<device>.
"""

import contextlib
import functools
import math
import time
from unittest import mock

import click
import torch
from torch.profiler import ProfilerActivity, profile

import fastsim
from bench.compile_report import pretending
from bench.results import write
from fastsim.backends.triton.backend import TritonBackend

WIDTH = 64
ROUNDS, STEPS = 40, 10
LOSSES = {
    "info_nce": functools.partial(fastsim.info_nce, temperature=0.05),
    "info_nce symmetric": functools.partial(fastsim.info_nce, temperature=0.05, symmetric=True),
    "siglip": functools.partial(fastsim.siglip, scale=10.0, bias=-10.0),
    "full_triplet": fastsim.full_triplet,
}


LARGE = 1 << 16  # numbers of a tensor that takes long to fill
empty = torch.Tensor.new_empty


def new_empty(tensor, *shape, **options):
    """Zeros, unless the tensor is large: uninitialised numbers may take longer to add."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    make = empty if math.prod(sizes) > LARGE else torch.Tensor.new_zeros
    return make(tensor, *shape, **options)


def nothing(*arguments, **options):
    """Takes the place of the driver's launch and of the library's products."""


@contextlib.contextmanager
def stubbed(architecture):
    """A context with the backend as on such a GPU, but without the work of driver and GPU."""
    from triton.compiler import CompiledKernel

    def loaded(kernel):
        kernel._run, kernel.function = nothing, 0

    patches = (
        mock.patch.object(CompiledKernel, "_init_handles", loaded),
        mock.patch.object(TritonBackend, "unsupported_reason", nothing),
        mock.patch.object(TritonBackend, "multiply", nothing),
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(pretending(architecture))
        yield


def milliseconds(step, patched):
    """[best, best within `patched()`] of several rounds in turns, by the clock of this thread."""
    best = [float("inf")] * 2
    for turn in range(2 * ROUNDS):
        with patched() if turn % 2 else contextlib.nullcontext():
            begin = time.thread_time()
            for _ in range(STEPS):
                step()
            best[turn % 2] = min(best[turn % 2], time.thread_time() - begin)
    return [1e3 * seconds / STEPS for seconds in best]


def calls_of(step):
    """The number of torch operators that a step calls, without those inside other operators."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    operators = [event for event in profiler.events() if event.name.startswith("aten::")]
    return sum(
        event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
        for event in operators
    )


def step_of(loss, rows, backend):
    """A function that does forward + backward."""
    x, y = (torch.randn(rows, WIDTH).bfloat16().requires_grad_() for _ in "xy")

    def step():
        x.grad = y.grad = None
        LOSSES[loss](x, y, backend=backend).backward()

    return step


def row_of_torch(loss, rows):
    step = step_of(loss, rows, "torch")
    step()
    calls = calls_of(step)
    best, _ = milliseconds(step, contextlib.nullcontext)
    return {"backend": "torch", "loss": loss, "rows": rows, "calls": calls, "ms": round(best, 4)}


def row_of(loss, rows):
    from fastsim.backends.triton.kernels import launching

    step, launched = step_of(loss, rows, "triton"), []

    def count(*launch):
        launched.append(launch)

    step()  # compiles
    calls = calls_of(step)
    with mock.patch.object(launching, "run", count):
        step()
    best, without = milliseconds(step, lambda: mock.patch.object(launching, "run", nothing))
    return {
        "backend": "triton",
        "loss": loss,
        "rows": rows,
        "launches": len(launched),
        "calls": calls,
        "ms": round(best, 4),
        "ms in the launcher": round(best - without, 4),
    }


@click.command()
@click.option("--architecture", default="sm_90")
@click.option("--rows", "sizes", multiple=True, type=int, default=(64, 256, 1024))
@click.option("--loss", "losses", multiple=True, type=click.Choice([*LOSSES]), default=[*LOSSES])
def main(architecture, sizes, losses):
    """Measure and write."""
    torch.set_num_threads(1)
    result = []
    with stubbed(architecture):
        for loss in losses:
            for rows in sizes:
                result.append({"architecture": architecture, **row_of(loss, rows)})
                click.echo(result[-1])
    for loss in losses:
        result.append(row_of_torch(loss, min(sizes)))
        click.echo(result[-1])
    write("host_time", result)


if __name__ == "__main__":
    main()

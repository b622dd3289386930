"""python -m bench.torch_backend: the torch backend beside the dense formula, on a CPU.

Of each tile loss the time of forward and backward of both in turns, and how far a call of the
backend raises the peak memory of a fresh process. Times are the processor's seconds of one thread,
which other programs on the machine do not lengthen. Writes torch_backend.jsonl in
bench/results/<device>; rows of other losses, sizes and measures stay there.
"""

import time

import click
import torch

from bench.results import FOLDER, write
from fastsim.benchmark import memory, results, timing
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.calls import runnable
from fastsim.benchmark.cases import CASES

NAME, BY = "torch_backend", ("fastsim torch", "fastsim eager")
TILES = [name for name, case in CASES.items() if case.products != (0, 0)]
KEY = ("loss", "rows", "width", "measure", "by")


def times(loss, rows, width, seconds):
    """A row for each of the two, taken in turns."""
    problem = CASES[loss].problem(rows, width)
    calls = {
        by: runnable(baseline_named(by).call(problem), problem, "forward + backward") for by in BY
    }
    # A large batch needs no warm-up: that of the small one before it has loaded all there is.
    warm_up = rows < 1024
    clock = time.process_time
    found_by = timing.in_turns(calls, seconds=seconds, warm_up=warm_up, clock=clock)
    for by, found in found_by.items():
        row = {"loss": loss, "rows": rows, "width": width, "measure": "CPU time", "by": by}
        yield row | ({"not measured": found} if isinstance(found, str) else timing.summary(found))


def peak(loss, rows, width):
    """A row of the memory beyond inputs and gradients."""
    found = memory.rise(loss, BY[0], rows, width)
    row = {"loss": loss, "rows": rows, "width": width, "measure": "memory", "by": BY[0]}
    return row | ({"not measured": found} if isinstance(found, str) else {"MB": found})


@click.command()
@click.option("--loss", "losses", multiple=True, type=click.Choice(TILES), default=TILES)
@click.option("--rows", multiple=True, type=int, default=(64, 8192), help="Of either side.")
@click.option("--times/--no-times", "timed", default=True, help="Or the memory alone.")
@click.option("--memory-rows", multiple=True, type=int, default=(16384,), help="For the memory.")
@click.option("--memory/--no-memory", "weighed", default=True, help="Or the times alone.")
@click.option("--width", default=384)
@click.option("--seconds", default=0.5, help="For the rounds of one loss at one size.")
def main(losses, rows, timed, memory_rows, weighed, width, seconds):
    """Measure and write."""
    about = results.environment()  # before the threads: these are in the device's name
    torch.set_num_threads(1)
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    kept = results.read(path)[1] if path.is_file() else []
    rows_found = {tuple(row[key] for key in KEY): row for row in kept}
    for loss in losses:
        found = [row for count in rows * timed for row in times(loss, count, width, seconds)]
        found += [peak(loss, count, width) for count in memory_rows * weighed]
        for row in found:
            rows_found[tuple(row[key] for key in KEY)] = row
            click.echo(row)
        write(NAME, list(rows_found.values()), about)


if __name__ == "__main__":
    main()

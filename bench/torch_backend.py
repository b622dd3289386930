"""python -m bench.torch_backend: the torch backend beside the dense formula, on a CPU.

Times forward + backward of each tile loss with both, in turns, and measures how far a call of the
backend raises the peak memory of a fresh process. Times are processor seconds of one thread, which
other programs do not lengthen. Writes torch_backend.jsonl in bench/results/<device>; rows of other
losses, sizes and measures in the file stay.
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
    """A row for each of the two implementations, timed in turns."""
    problem = CASES[loss].problem(rows, width)
    calls = {
        by: runnable(baseline_named(by).call(problem), problem, "forward + backward") for by in BY
    }
    # A large batch needs no warm-up, as the small batch before it has loaded all code.
    cold = () if rows < 1024 else calls
    clock = time.process_time
    times_by = timing.in_turns(calls, seconds=seconds, cold=cold, clock=clock)
    for by, rounds in times_by.items():
        row = {"loss": loss, "rows": rows, "width": width, "measure": "CPU time", "by": by}
        failed = isinstance(rounds, str)
        yield row | ({"not measured": rounds} if failed else timing.summary(rounds))


def peak(loss, rows, width):
    """The row of the memory beyond inputs and gradients."""
    megabytes = memory.rise(loss, BY[0], rows, width)
    row = {"loss": loss, "rows": rows, "width": width, "measure": "memory", "by": BY[0]}
    failed = isinstance(megabytes, str)
    return row | ({"not measured": megabytes} if failed else {"MB": megabytes})


@click.command()
@click.option("--loss", "losses", multiple=True, type=click.Choice(TILES), default=TILES)
@click.option("--rows", multiple=True, type=int, default=(64, 8192), help="Rows to time.")
@click.option("--times/--no-times", "with_times", default=True, help="Measure times.")
@click.option(
    "--memory-rows", multiple=True, type=int, default=(16384,), help="Rows to measure memory at."
)
@click.option("--memory/--no-memory", "with_memory", default=True, help="Measure memory.")
@click.option("--width", default=384)
@click.option("--seconds", default=0.5, help="Time for each loss and size.")
def main(losses, rows, with_times, memory_rows, with_memory, width, seconds):
    """Measure and write."""
    about = results.environment()  # first, as the device's name has the number of threads
    torch.set_num_threads(1)
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    earlier = results.read(path)[1] if path.is_file() else []
    result = {tuple(row[key] for key in KEY): row for row in earlier}
    for loss in losses:
        new = [row for count in rows * with_times for row in times(loss, count, width, seconds)]
        new += [peak(loss, count, width) for count in memory_rows * with_memory]
        for row in new:
            result[tuple(row[key] for key in KEY)] = row
            click.echo(row)
        write(NAME, list(result.values()), about)


if __name__ == "__main__":
    main()

"""python -m bench.small_batches: every loss on the CPU at 64 x 384, where the cost of a call shows.

--rows sets other numbers of rows, such as those that the height of a register tile does not divide.

Times the forward pass and forward + backward of each loss in one thread, in turns with the dense
formula in eager torch, and for headline losses with that formula under torch.compile. Writes
small_batches.jsonl in bench/results/<device>; rows of other losses, sizes and kernels in the file
stay.
"""

import time

import click
import torch

from bench.results import FOLDER, write
from fastsim.backends import get
from fastsim.benchmark import results, timing
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import PASSES, runnable
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.memory import GIB, limited, usual_limit

NAME, BY = "small_batches", ("fastsim cpu", "eager torch", "torch.compile")
KEY = ("loss", "rows", "width", "measure", "by", "kernels")
WIDTH = 384
MOST_ROUNDS = 2000


def _calls(problem, which):
    """{implementation: a function that does one pass}, of the implementations with this loss."""
    calls = {}
    for by in BY:
        try:
            calls[by] = runnable(baseline_named(by).call(problem), problem, which)
        except (UnavailableError, KeyError):
            continue
    return calls


def times(loss, count, seconds, clock):
    """A row for each implementation and pass, timed in turns. count: rows of the batch."""
    problem = CASES[loss].problem(count, WIDTH)
    kernels = get("cpu").note().removeprefix(", ")
    for which in PASSES:
        calls = _calls(problem, which)
        with limited(int(usual_limit() * GIB)):  # some formulas need the square of the score matrix
            times_by = timing.in_turns(calls, seconds=seconds, most=MOST_ROUNDS, clock=clock)
        for by, rounds in times_by.items():
            row = {"loss": loss, "rows": count, "width": WIDTH, "measure": which, "by": by}
            row["kernels"] = kernels
            failed = isinstance(rounds, str)
            yield row | ({"not measured": rounds} if failed else timing.summary(rounds))


@click.command()
@click.option("--loss", "losses", multiple=True, type=click.Choice([*CASES]), default=[*CASES])
@click.option("--rows", "counts", multiple=True, type=int, default=(64,), help="Rows of each side.")
@click.option("--seconds", default=0.6, help="Time for one pass of one loss.")
def main(losses, counts, seconds):
    """Measure and write."""
    about = results.environment()  # first, as the device's name has the number of threads
    torch.set_num_threads(1)
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    earlier = results.read(path)[1] if path.is_file() else []
    rows = {_key(row): row for row in earlier}
    for loss in losses:
        for count in counts:
            for row in times(loss, count, seconds, time.perf_counter):
                rows[_key(row)] = row
                click.echo(row)
        write(NAME, list(rows.values()), about)


def _key(row):
    return tuple(row.get(name) for name in KEY)


if __name__ == "__main__":
    main()

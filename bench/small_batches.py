"""python -m bench.small_batches: every loss on the CPU at 64 x 384, where a call's own cost shows.

--rows takes other numbers of rows: those that no register tile divides are its edges.

Of each loss the time of the forward pass alone and with backward, ours beside the dense formula in
eager torch and, of the headlines, beside torch.compile of it: one thread, in turns. Writes
small_batches.jsonl in bench/results/<device>; rows of other losses, sizes and kernels stay there.
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
MOST = 2000  # rounds


def _calls(problem, which):
    """{who: one pass} of those that have the loss."""
    found = {}
    for by in BY:
        try:
            found[by] = runnable(baseline_named(by).call(problem), problem, which)
        except (UnavailableError, KeyError):
            continue
    return found


def times(loss, count, seconds, clock):
    """A row for each of them and each pass, taken in turns; count: rows of the batch."""
    problem = CASES[loss].problem(count, WIDTH)
    kernels = get("cpu").note().removeprefix(", ")
    for which in PASSES:
        with limited(int(usual_limit() * GIB)):  # some formulas take the square of the matrix
            found_by = timing.in_turns(
                _calls(problem, which), seconds=seconds, most=MOST, clock=clock
            )
        for by, found in found_by.items():
            row = {"loss": loss, "rows": count, "width": WIDTH, "measure": which, "by": by}
            row["kernels"] = kernels
            yield row | (
                {"not measured": found} if isinstance(found, str) else timing.summary(found)
            )


@click.command()
@click.option("--loss", "losses", multiple=True, type=click.Choice([*CASES]), default=[*CASES])
@click.option("--rows", "counts", multiple=True, type=int, default=(64,), help="Of either side.")
@click.option("--seconds", default=0.6, help="For the rounds of one pass of one loss.")
def main(losses, counts, seconds):
    """Measure and write."""
    about = results.environment()  # before the threads: these are in the device's name
    torch.set_num_threads(1)
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    kept = results.read(path)[1] if path.is_file() else []
    rows = {_key(row): row for row in kept}
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

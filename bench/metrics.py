"""What `fastsim.metrics` costs: a loss with its gradient, on and off in turns.

    python -m bench.metrics [--seconds 4]

One row a loss and size: medians of the times, the median of the ratios of two that followed each
other, which share what else the machine was doing, and whether value and gradients had the same
bits. Times are the processor's seconds of one thread.
"""

import statistics
import time

import click
import torch

import fastsim
from bench.results import read, write
from fastsim.benchmark.baselines import ours
from fastsim.benchmark.calls import step
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.results import environment

LOSSES = ("info_nce", "info_nce symmetric", "siglip")
SIZES, WIDTH = (512, 2048, 8192), 384
FEWEST = 5  # rounds


def timed(call, problem, on):
    """(seconds, value and gradients) of one step, seen or not."""
    start = time.process_time()
    if on:
        with fastsim.metrics() as seen:
            loss = step(call, problem)
        seen.read()
    else:
        loss = step(call, problem)
    return time.process_time() - start, [loss, *(leaf.grad for leaf in problem.leaves)]


def measured(name, rows, seconds):
    """The row of results of one loss and size."""
    problem = CASES[name].problem(rows, WIDTH)
    call = ours("cpu").call(problem)
    same = all(map(torch.equal, *(timed(call, problem, on)[1] for on in (True, False))))
    times, end = {True: [], False: []}, time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[True]) < FEWEST:
        # Either goes first, in turns: the second finds more in the caches.
        first = len(times[True]) % 2 == 0
        for on in (first, not first):
            times[on].append(timed(call, problem, on)[0])
    on, off = (statistics.median(times[key]) for key in (True, False))
    ratio = statistics.median(a / b for a, b in zip(times[True], times[False], strict=True))
    return {
        "loss": name,
        "rows": rows,
        "width": WIDTH,
        "on ms": round(1e3 * on, 2),
        "off ms": round(1e3 * off, 2),
        "ratio": round(ratio, 4),
        "rounds": len(times[True]),
        "same bits": same,
    }


@click.command()
@click.option("--loss", "losses", multiple=True, type=click.Choice(LOSSES), default=LOSSES)
@click.option("--rows", multiple=True, type=int, default=SIZES, help="Of either side.")
@click.option("--seconds", default=4.0, help="For one loss at one size.")
def main(losses, rows, seconds):
    """Measure and write bench/results/<device>/metrics.jsonl; other rows stay there."""
    about = environment("cpu")
    torch.set_num_threads(1)
    _, kept = read("metrics", about["device"]) or (None, [])
    found = {(row["loss"], row["rows"]): row for row in kept}
    for name in losses:
        for size in rows:
            found[name, size] = measured(name, size, seconds)
            click.echo(found[name, size])
            write("metrics", list(found.values()), about)


if __name__ == "__main__":
    main()

"""The cost of `fastsim.metrics`: a loss and its gradient with and without it, in turns.

    python -m bench.metrics [--seconds 4]

A row for each loss and size has the medians of both times, the median of their ratios, and whether
the loss and its gradients had the same bits. A ratio is that of two successive calls, which other
load on the machine affects alike. Times are processor seconds of one thread.
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
    """(seconds, [loss, gradients]) of one step, with `fastsim.metrics` if `on`."""
    start = time.process_time()
    if on:
        with fastsim.metrics() as recorder:
            loss = step(call, problem)
        recorder.read()
    else:
        loss = step(call, problem)
    return time.process_time() - start, [loss, *(leaf.grad for leaf in problem.leaves)]


def measured(name, rows, seconds):
    """The result row of one loss and size."""
    problem = CASES[name].problem(rows, WIDTH)
    call = ours("cpu").call(problem)
    same = all(map(torch.equal, *(timed(call, problem, on)[1] for on in (True, False))))
    times, end = {True: [], False: []}, time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[True]) < FEWEST:
        # They take turns to be first, since the second call finds more in the caches.
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
@click.option("--rows", multiple=True, type=int, default=SIZES, help="Rows of each side.")
@click.option("--seconds", default=4.0, help="Time for each loss and size.")
def main(losses, rows, seconds):
    """Measure and write bench/results/<device>/metrics.jsonl; other rows in the file stay."""
    about = environment("cpu")
    torch.set_num_threads(1)
    _, earlier = read("metrics", about["device"]) or (None, [])
    result = {(row["loss"], row["rows"]): row for row in earlier}
    for name in losses:
        for size in rows:
            result[name, size] = measured(name, size, seconds)
            click.echo(result[name, size])
            write("metrics", list(result.values()), about)


if __name__ == "__main__":
    main()

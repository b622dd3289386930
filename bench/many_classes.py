"""python -m bench.many_classes: losses against class weights beside pytorch-metric-learning's.

The time of forward and backward, both in turns in one process, and how far a call raises the peak
memory of a fresh one beyond inputs and gradients, which are those of the class weights too. Writes
many_classes.jsonl in bench/results/<device>.
"""

import click
import torch

from bench import time_and_memory
from bench.drop_in_cases import CLASS_LOSSES, labelled, of_classes
from bench.results import write
from bench.tables import markdown, milliseconds, of_rows
from fastsim.benchmark import results
from fastsim.benchmark.baselines import pytorch_metric_learning
from fastsim.benchmark.cases import Problem

NAME = "many_classes"
LIBRARIES = {
    "fastsim": pytorch_metric_learning.drop_in,
    "pytorch-metric-learning": pytorch_metric_learning.theirs,
}
SMALL = 64, 100


def problem(loss, size):
    """Embeddings, class weights and labels of this many rows and classes, of this width."""
    leaves, given = labelled(loss, *size, torch.Generator().manual_seed(0))
    return Problem(None, [leaf.requires_grad_() for leaf in leaves], given)


def peak(name, loss, size):
    """Megabytes (2^20 bytes) of one call; for a process of its own."""
    given, small = problem(loss, size), problem(loss, (*SMALL, size[-1]))
    call, first = (of_classes(loss)(LIBRARIES[name], of) for of in (given, small))
    return time_and_memory.rise(call, given, first, small)


def measured(loss, size, seconds):
    """A row of each library."""
    given = problem(loss, size)
    calls = {name: of_classes(loss)(library, given) for name, library in LIBRARIES.items()}
    about = {"loss": loss, "size": size}
    return time_and_memory.rows(about, calls, given, seconds, peak, loss, size)


@of_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    found = {}
    for row in rows:
        best = milliseconds(min(row["repeats ms"])) if "repeats ms" in row else row["not measured"]
        above = f"{row['MB']:,.0f} MB" if "MB" in row else row["memory"]
        found.setdefault((row["loss"], *row["size"]), {})[row["by"]] = f"{best}, {above}"
    lines = [
        [loss, f"{rows:,}", f"{classes:,}", f"{width}", *map(costs.get, LIBRARIES)]
        for (loss, rows, classes, width), costs in found.items()
    ]
    return markdown(["loss", "rows", "classes", "D", *LIBRARIES], lines, 4)


@click.command()
@click.option("--rows", default=512, show_default=True)
@click.option("--classes", default=100_000, show_default=True)
@click.option("--width", default=384, show_default=True)
@click.option("--seconds", default=12.0, show_default=True, help="for the rounds of a loss")
def main(rows, classes, width, seconds):
    """Measure and write."""
    about, found = results.environment(), []
    for loss in CLASS_LOSSES:
        for row in measured(loss, (rows, classes, width), seconds):
            found.append(row)
            click.echo(row)
    click.echo(write(NAME, found, about))


if __name__ == "__main__":
    main()

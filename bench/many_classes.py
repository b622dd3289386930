"""python -m bench.many_classes: losses with class weights, beside pytorch-metric-learning.

Measures the time of forward + backward, in turns in one process, and how far a call raises the peak
memory of a fresh process beyond inputs and gradients, which include those of the class weights.
Writes many_classes.jsonl in bench/results/<device>.
"""

import click
import torch

from bench import time_and_memory
from bench.drop_in_cases import CLASS_LOSSES, labelled, of_classes
from bench.results import write
from bench.tables import from_rows, markdown, milliseconds
from fastsim.benchmark import results
from fastsim.benchmark.baselines import pytorch_metric_learning
from fastsim.benchmark.cases import Problem

NAME = "many_classes"
LIBRARIES = {
    "fastsim": pytorch_metric_learning.drop_in,
    "pytorch-metric-learning": pytorch_metric_learning.theirs,
}
SMALL = 64, 100  # rows and classes of the first call in a process


def problem(loss, size):
    """Embeddings, class weights and labels. size: (rows, classes, width)."""
    leaves, arguments = labelled(loss, *size, torch.Generator().manual_seed(0))
    return Problem(None, [leaf.requires_grad_() for leaf in leaves], arguments)


def peak(name, loss, size):
    """Megabytes (2^20 bytes) of one call; runs in a fresh process."""
    inputs, small = problem(loss, size), problem(loss, (*SMALL, size[-1]))
    call, first = (of_classes(loss)(LIBRARIES[name], part) for part in (inputs, small))
    return time_and_memory.rise(call, inputs, first, small)


def measured(loss, size, seconds):
    """A result row for each library."""
    inputs = problem(loss, size)
    calls = {name: of_classes(loss)(library, inputs) for name, library in LIBRARIES.items()}
    about = {"loss": loss, "size": size}
    return time_and_memory.rows(about, calls, inputs, seconds, peak, loss, size)


@from_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    table_rows = {}
    for row in rows:
        best = milliseconds(min(row["repeats ms"])) if "repeats ms" in row else row["not measured"]
        memory = f"{row['MB']:,.0f} MB" if "MB" in row else row["memory"]
        table_rows.setdefault((row["loss"], *row["size"]), {})[row["by"]] = f"{best}, {memory}"
    lines = [
        [loss, f"{rows:,}", f"{classes:,}", f"{width}", *map(costs.get, LIBRARIES)]
        for (loss, rows, classes, width), costs in table_rows.items()
    ]
    return markdown(["loss", "rows", "classes", "D", *LIBRARIES], lines, 4)


@click.command()
@click.option("--rows", default=512, show_default=True)
@click.option("--classes", default=100_000, show_default=True)
@click.option("--width", default=384, show_default=True)
@click.option("--seconds", default=12.0, show_default=True, help="Time for each loss.")
def main(rows, classes, width, seconds):
    """Measure and write."""
    about, result = results.environment(), []
    for loss in CLASS_LOSSES:
        for row in measured(loss, (rows, classes, width), seconds):
            result.append(row)
            click.echo(row)
    click.echo(write(NAME, result, about))


if __name__ == "__main__":
    main()

"""The cost of prefixes: losses summed over four widths, beside the loss of the full width alone.

    python -m bench.matryoshka [--seconds 12]

Times forward + backward in turns: `fastsim.losses.Matryoshka`, the same loss width by width, the
dense formula width by width, and MatryoshkaLoss of sentence-transformers. Times are processor
seconds of one thread, which other programs do not lengthen. Writes matryoshka.jsonl in
bench/results/<device>; rows of other losses and sizes in the file stay.
"""

import time

import click
import torch

from bench.results import read, write
from bench.tables import from_rows, markdown, milliseconds
from fastsim import losses
from fastsim.benchmark import results, timing
from fastsim.benchmark.baselines import sentence_transformers as peer
from fastsim.benchmark.calls import runnable
from fastsim.benchmark.cases import CASES

NAME, WIDTHS = "matryoshka", (384, 256, 128, 64)
SIZES = (1024, 4096)
FULL, SWEEP = "full width", "one sweep"
MODULES = {
    "info_nce": losses.InfoNCE,
    "info_nce symmetric": losses.InfoNCE,
    "siglip": losses.SigLIP,
    "matrix_cross_entropy": losses.MatrixCrossEntropy,
    "matrix_mse": losses.MatrixMSE,
}


def width_by_width(loss, arguments):
    def call(*leaves):
        return sum(loss(*(leaf[:, :width] for leaf in leaves), *arguments) for width in WIDTHS)

    return call


def calls(name, problem):
    """{implementation: call(*leaves)}."""
    make, arguments = MODULES[name], problem.arguments
    ours, dense = (make(**problem.options, backend=backend) for backend in ("cpu", "eager"))
    prefixes = losses.Matryoshka(ours, WIDTHS)
    result = {
        FULL: lambda *leaves: ours(*leaves, *arguments),
        SWEEP: lambda *leaves: prefixes(*leaves, *arguments),
        "width by width": width_by_width(ours, arguments),
        "eager torch": width_by_width(dense, arguments),
    }
    if name == "info_nce":
        result["sentence-transformers"] = peer.info_nce_prefixes(peer.theirs, problem)
    return result


def measured(name, rows, seconds, clock=time.process_time):
    """The result rows of one loss and size."""
    problem = CASES[name].problem(rows, WIDTHS[0])
    functions = {
        by: runnable(call, problem, "forward + backward")
        for by, call in calls(name, problem).items()
    }
    about = {"loss": name, "rows": rows, "widths": list(WIDTHS), "products": results.instructions()}
    for by, times in timing.in_turns(functions, seconds=seconds, clock=clock).items():
        row = about | {"by": by}
        yield row | ({"not measured": times} if isinstance(times, str) else timing.summary(times))


def _place(row):
    return row["products"], row["rows"], row["loss"]


def ratios(rows):
    """{place: {implementation: (best time, its ratio to that of the full width)}}."""
    best_times = {}
    for row in rows:
        if "repeats ms" in row:
            best_times.setdefault(_place(row), {})[row["by"]] = min(row["repeats ms"])
    return {
        place: {by: (best, best / times[FULL]) for by, best in times.items()}
        for place, times in best_times.items()
    }


@from_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    by_place = ratios(rows)
    names = dict.fromkeys(by for cells in by_place.values() for by in cells)
    names = [by for by in names if by != FULL]
    lines = [
        [
            *(loss, f"{rows:,}", unit, milliseconds(cells[FULL][0])),
            *(f"{cells[by][1]:.2f}" if by in cells else "" for by in names),
        ]
        for (unit, rows, loss), cells in by_place.items()
    ]
    return markdown(["loss", "rows", "products", FULL, *names], lines)


@click.command()
@click.option("--loss", "names", multiple=True, type=click.Choice([*MODULES]), default=[*MODULES])
@click.option("--rows", "sizes", multiple=True, type=int, default=SIZES, help="Rows of each side.")
@click.option("--seconds", default=12.0, help="Time for each loss and size.")
def main(names, sizes, seconds):
    """Measure and write."""
    about = results.environment("cpu")  # first, as the device's name has the number of threads
    torch.set_num_threads(1)
    _, kept = read(NAME, about["device"]) or (None, [])
    for name in names:
        for size in sizes:
            new = list(measured(name, size, seconds))
            place = results.instructions(), size, name
            kept = sorted([row for row in kept if _place(row) != place] + new, key=_place)
            click.echo(ratios(new))
            write(NAME, kept, about)


if __name__ == "__main__":
    main()

"""What prefixes cost: losses summed over four widths, beside the same loss of the full width alone.

    python -m bench.matryoshka [--seconds 12]

Forward and backward of `fastsim.losses.Matryoshka`, the widths one after another, the dense formula
so, and sentence-transformers' MatryoshkaLoss, in turns. Times are the processor's seconds of one
thread, which other programs do not lengthen. Writes matryoshka.jsonl in bench/results/<device>;
rows of losses and sizes that are not asked for stay there.
"""

import time

import click
import torch

from bench.results import read, write
from bench.tables import markdown, milliseconds, of_rows
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


def width_by_width(loss, given):
    def call(*leaves):
        return sum(loss(*(leaf[:, :width] for leaf in leaves), *given) for width in WIDTHS)

    return call


def calls(name, problem):
    """{by: call(*leaves)}."""
    make, given = MODULES[name], problem.arguments
    ours, dense = (make(**problem.options, backend=backend) for backend in ("cpu", "eager"))
    prefixes = losses.Matryoshka(ours, WIDTHS)
    found = {
        FULL: lambda *leaves: ours(*leaves, *given),
        SWEEP: lambda *leaves: prefixes(*leaves, *given),
        "width by width": width_by_width(ours, given),
        "eager torch": width_by_width(dense, given),
    }
    if name == "info_nce":
        found["sentence-transformers"] = peer.info_nce_prefixes(peer.theirs, problem)
    return found


def measured(name, rows, seconds, clock=time.process_time):
    """The rows of results of one loss and size."""
    problem = CASES[name].problem(rows, WIDTHS[0])
    both = {
        by: runnable(call, problem, "forward + backward")
        for by, call in calls(name, problem).items()
    }
    about = {"loss": name, "rows": rows, "widths": list(WIDTHS), "products": results.instructions()}
    for by, found in timing.in_turns(both, seconds=seconds, clock=clock).items():
        row = about | {"by": by}
        yield row | ({"not measured": found} if isinstance(found, str) else timing.summary(found))


def _place(row):
    return row["products"], row["rows"], row["loss"]


def ratios(rows):
    """{place: {by: (best, best over that of the full width)}}."""
    found = {}
    for row in rows:
        if "repeats ms" in row:
            found.setdefault(_place(row), {})[row["by"]] = min(row["repeats ms"])
    return {
        place: {by: (best, best / of[FULL]) for by, best in of.items()}
        for place, of in found.items()
    }


@of_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    found = ratios(rows)
    names = [by for by in dict.fromkeys(by for of in found.values() for by in of) if by != FULL]
    lines = [
        [
            *(loss, f"{rows:,}", unit, milliseconds(of[FULL][0])),
            *(f"{of[by][1]:.2f}" if by in of else "" for by in names),
        ]
        for (unit, rows, loss), of in found.items()
    ]
    return markdown(["loss", "rows", "products", FULL, *names], lines)


@click.command()
@click.option("--loss", "names", multiple=True, type=click.Choice([*MODULES]), default=[*MODULES])
@click.option("--rows", "sizes", multiple=True, type=int, default=SIZES, help="Of either side.")
@click.option("--seconds", default=12.0, help="For the rounds of one loss at one size.")
def main(names, sizes, seconds):
    """Measure and write."""
    about = results.environment("cpu")  # before the threads: these are in the device's name
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

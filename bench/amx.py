"""python -m bench.amx: losses with bfloat16 products (Intel AMX, AVX512_BF16) beside eager torch.

Times forward + backward of each loss and dtype in turns: fastsim, the dense formula in eager torch
in that dtype, and three bare products of the size of the score matrix, one for the scores and one
for each gradient. Times are processor seconds of one thread, which other programs change least.
Errors are relative to float64, at fewer rows, where float64 is affordable. Writes
bench/results/<device>/amx_<dtype>_<rows>.jsonl. `fastsim info` names the instructions in use.
"""

import time

import click
import torch

from bench.results import FOLDER, read, write
from bench.tables import markdown, milliseconds
from fastsim.backends import get
from fastsim.benchmark.accuracy import errors
from fastsim.benchmark.baselines import BASELINES, ours
from fastsim.benchmark.calls import runnable
from fastsim.benchmark.cases import CASES, problem_in
from fastsim.benchmark.dtypes import AUTOCAST
from fastsim.benchmark.results import environment
from fastsim.benchmark.timing import in_turns, summary

LOSSES = ("info_nce", "info_nce symmetric", "siglip")
DTYPES = ("bfloat16", "float16", "float32", AUTOCAST)
PRECISIONS = ("highest", "high", "medium")
BOTH = "forward + backward"
NAMES = "amx_*"
OURS, DENSE, BARE = "fastsim", "eager torch", "three products"
ERROR_ROWS = 1024  # with a few hundred rows a loss is computed in float32


def products(problem):
    """The three products of the score matrix without a loss."""
    x, y = (leaf.detach().to(problem.autocast or leaf.dtype) for leaf in problem.leaves)

    def run():
        scores = x @ y.T
        scores @ y
        scores.T @ x

    return run


def measured(case, dtype, rows, width, seconds):
    """The result rows of one problem; dtype: a name in `DTYPES`."""
    problem, small = (case.problem(n, width, **problem_in(dtype)) for n in (rows, ERROR_ROWS))
    makers = {OURS: ours("cpu"), DENSE: BASELINES[DENSE]}
    calls = {name: maker.call(problem) for name, maker in makers.items()}
    functions = {name: runnable(call, problem, BOTH) for name, call in calls.items()}
    times = in_turns(
        functions | {BARE: products(problem)}, seconds=seconds, clock=time.process_time
    )
    for name, rounds in times.items():
        row = {"loss": case.name, "dtype": dtype, "rows": rows, "dim": width, "name": name}
        row |= {"not measured": rounds} if isinstance(rounds, str) else summary(rounds)
        if name in makers:
            row |= errors(makers[name].call(small), small)
        yield row


def table(folder):
    """The table of a device in bench/README.md: times as multiples of fastsim's."""
    lines = []
    for path in sorted((FOLDER / folder).glob(f"{NAMES}.jsonl")):
        about, rows = read(path.stem, folder)
        for loss in dict.fromkeys(row["loss"] for row in rows):
            by_name = {row["name"]: row for row in rows if row["loss"] == loss}
            best = {name: min(row["repeats ms"]) for name, row in by_name.items()}
            dtype, count = by_name[OURS]["dtype"], f"{by_name[OURS]['rows']:,}"
            precision = about["settings"]["precision"] if dtype == "float32" else ""
            lines.append(
                [
                    *(loss, dtype, precision, count, milliseconds(best[OURS])),
                    *(f"{best[name] / best[OURS]:.2f} x" for name in (DENSE, BARE)),
                    *(f"{by_name[name]['gradient error']:.1e}" for name in (OURS, DENSE)),
                ]
            )
    errors = [f"{name}'s gradient error" for name in (OURS, DENSE)]
    head = ["loss", "dtype", "precision", "rows", OURS, DENSE, BARE, *errors]
    return markdown(head, sorted(lines, key=lambda line: LOSSES.index(line[0])), left=3)


@click.command(help=__doc__)
@click.option("--rows", default=4096, show_default=True)
@click.option("--dim", default=384, show_default=True)
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=DTYPES)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default=PRECISIONS[0],
    show_default=True,
    help="Precision of all float32 products.",
)
@click.option("--seconds", default=6.0, show_default=True, help="Time for each loss and dtype.")
def main(rows, dim, dtypes, precision, seconds):
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(1)
    settings = {"rows": rows, "dim": dim, "seconds": seconds, "precision": precision}
    about = environment("cpu", settings | {"kernels": get("cpu").note()})
    for dtype in dtypes:
        result = []
        suffix = "" if precision == PRECISIONS[0] else f"_{precision}"
        for name in LOSSES:
            for row in measured(CASES[name], dtype, rows, dim, seconds):
                result.append(row)
                click.echo(row)
            # After each loss, so that its rows are kept if the run is interrupted.
            write(f"amx_{dtype}{suffix}_{rows}", result, about)


if __name__ == "__main__":
    main()

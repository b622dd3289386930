"""python -m bench.errors: the errors of every loss on the CPU, beside those of eager torch.

Each loss and its gradients, by fastsim and by the dense formula in eager torch of the same dtype,
against the dense formula in float64 (`fastsim.benchmark.accuracy`), at the most rows up to --rows
that the float64 formula can be made of. Of several draws the worst counts. Where products of
bfloat16 are in use, float32 is measured at each precision of `torch.set_float32_matmul_precision`
that these have a say in. Writes errors.jsonl in bench/results/<device>.

No speed is measured, so FASTSIM_AMX=emulated serves as well as a processor with Intel AMX.
"""

import click
import torch

from bench.results import write
from bench.tables import markdown, of_rows
from fastsim.backends import get
from fastsim.backends.cpu import amx
from fastsim.benchmark import results
from fastsim.benchmark.accuracy import errors
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.cases import CASES

NAME, OURS, DENSE = "errors", "fastsim cpu", "eager torch"
KINDS = ("gradient error", "loss error")
PRECISIONS = ("highest", "high", "medium")
ROWS, WIDTH = 1100, 384  # no multiple of a tile; of few hundred, a loss is made in float32
DRAWS = 3
PAIRED = ("cosent_matrix",)  # its dense formula has a term for every pair of scores


def kinds():
    """(dtype, precision) of every column; the precision is None where it changes nothing."""
    of_float32 = (None,)
    if amx.name():
        of_float32 = PRECISIONS if amx.is_matrix_unit() else (PRECISIONS[0], PRECISIONS[-1])
    return [
        *((torch.float32, precision) for precision in of_float32),
        (torch.float16, None),
        (torch.bfloat16, None),
    ]


def measured(case, dtype, precision, rows, width):
    """A row for each of the two: their worst errors of several draws."""
    if case.name in PAIRED or not case.products[1]:
        rows = min(rows, case.exact)
    about = {"loss": case.name, "rows": rows, "width": width}
    about |= {"dtype": str(dtype).removeprefix("torch."), "precision": precision}
    about["kernels"] = get("cpu").note().removeprefix(", ")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or PRECISIONS[0])
    try:
        problems = [case.problem(rows, width, dtype=dtype, seed=seed) for seed in range(DRAWS)]
        for by in (OURS, DENSE):
            found = [errors(baseline_named(by).call(problem), problem) for problem in problems]
            yield about | {"by": by} | {kind: max(of[kind] for of in found) for kind in KINDS}
    finally:
        torch.set_float32_matmul_precision(before)


@of_rows(NAME)
def table(rows):
    """The errors of the gradients in a table; below it those of the losses, the largest of each."""
    found = {}
    for row in rows:
        found.setdefault((row["loss"], row["rows"]), {})[_column(row), row["by"]] = row
    columns = list(dict.fromkeys(_column(row) for row in rows))
    gradients = [
        [loss, f"{rows:,}", *(_pair([of], column, "gradient error") for column in columns)]
        for (loss, rows), of in found.items()
    ]
    losses = (f"{column} {_pair(found.values(), column, 'loss error')}" for column in columns)
    return (
        f"{markdown(['gradients of', 'N', *columns], gradients)}\n\n"
        f"The losses themselves, the largest error of all: {', '.join(losses)}."
    )


def _column(row):
    return row["dtype"] if row["precision"] is None else f"{row['dtype']} {row['precision']}"


def _pair(found, column, kind):
    """The largest error of ours, and in brackets that of the dense formula."""
    ours, dense = (max(of[column, by][kind] for of in found) for by in (OURS, DENSE))
    return f"{ours:.1e} ({dense:.1e})"


@click.command(help=__doc__)
@click.option("--loss", "losses", multiple=True, type=click.Choice([*CASES]), default=[*CASES])
@click.option("--rows", default=ROWS, show_default=True)
@click.option("--dim", "width", default=WIDTH, show_default=True)
def main(losses, rows, width):
    about = results.environment("cpu", {"rows": rows, "dim": width, "draws": DRAWS})
    found = []
    for dtype, precision in kinds():
        for name in losses:
            for row in measured(CASES[name], dtype, precision, rows, width):
                found.append(row)
                click.echo(row)
    write(NAME, found, about)


if __name__ == "__main__":
    main()

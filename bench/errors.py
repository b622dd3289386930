"""python -m bench.errors: the errors of every loss on the CPU, beside those of eager torch.

Each loss and its gradients are computed by fastsim and by the dense formula in eager torch in the
same dtype, and compared with the dense formula in float64 (`fastsim.benchmark.accuracy`). N is
--rows, or the largest at which the float64 formula is affordable. The worst of several draws
counts. If bfloat16 products are in use, float32 is measured at each precision of
`torch.set_float32_matmul_precision` that changes them. Writes errors.jsonl in
bench/results/<device>.

No time is measured, so FASTSIM_AMX=emulated serves as well as a processor with Intel AMX.
"""

import click
import torch

from bench.results import write
from bench.tables import from_rows, markdown
from fastsim.backends import get
from fastsim.backends.cpu import amx
from fastsim.benchmark import results
from fastsim.benchmark.accuracy import errors
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.cases import CASES

NAME, OURS, DENSE = "errors", "fastsim cpu", "eager torch"
KINDS = ("gradient error", "loss error")
PRECISIONS = ("highest", "high", "medium")
ROWS, WIDTH = 1100, 384  # not a multiple of a tile; a loss of a few hundred rows is in float32
DRAWS = 3
PAIRS_OF_SCORES = ("cosent_matrix",)  # losses whose dense formula has a term for each such pair


def kinds():
    """(dtype, precision) of every column; the precision is None if it changes nothing."""
    precisions = (None,)
    if amx.name():
        precisions = PRECISIONS if amx.is_matrix_unit() else (PRECISIONS[0], PRECISIONS[-1])
    return [
        *((torch.float32, precision) for precision in precisions),
        (torch.float16, None),
        (torch.bfloat16, None),
    ]


def measured(case, dtype, precision, rows, width):
    """A row for fastsim and one for eager torch: the worst errors of several draws."""
    if case.name in PAIRS_OF_SCORES or not case.products[1]:
        rows = min(rows, case.error_rows)
    about = {"loss": case.name, "rows": rows, "width": width}
    about |= {"dtype": str(dtype).removeprefix("torch."), "precision": precision}
    about["kernels"] = get("cpu").note().removeprefix(", ")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision or PRECISIONS[0])
    try:
        problems = [case.problem(rows, width, dtype=dtype, seed=seed) for seed in range(DRAWS)]
        for by in (OURS, DENSE):
            draws = [errors(baseline_named(by).call(problem), problem) for problem in problems]
            worst = {kind: max(draw[kind] for draw in draws) for kind in KINDS}
            yield about | {"by": by} | worst
    finally:
        torch.set_float32_matmul_precision(before)


@from_rows(NAME)
def table(rows):
    """A table of the errors of the gradients; below it the largest error of the losses."""
    by_loss = {}
    for row in rows:
        by_loss.setdefault((row["loss"], row["rows"]), {})[_column(row), row["by"]] = row
    columns = list(dict.fromkeys(_column(row) for row in rows))
    gradients = [
        [loss, f"{rows:,}", *(_pair([cells], column, "gradient error") for column in columns)]
        for (loss, rows), cells in by_loss.items()
    ]
    losses = (f"{column} {_pair(by_loss.values(), column, 'loss error')}" for column in columns)
    return (
        f"{markdown(['gradients of', 'N', *columns], gradients)}\n\n"
        f"The losses themselves, the largest error of all: {', '.join(losses)}."
    )


def _column(row):
    return row["dtype"] if row["precision"] is None else f"{row['dtype']} {row['precision']}"


def _pair(losses, column, kind):
    """The largest error of fastsim, and in brackets that of the dense formula."""
    ours, dense = (max(cells[column, by][kind] for cells in losses) for by in (OURS, DENSE))
    return f"{ours:.1e} ({dense:.1e})"


@click.command(help=__doc__)
@click.option("--loss", "losses", multiple=True, type=click.Choice([*CASES]), default=[*CASES])
@click.option("--rows", default=ROWS, show_default=True)
@click.option("--dim", "width", default=WIDTH, show_default=True)
def main(losses, rows, width):
    about = results.environment("cpu", {"rows": rows, "dim": width, "draws": DRAWS})
    result = []
    for dtype, precision in kinds():
        for name in losses:
            for row in measured(CASES[name], dtype, precision, rows, width):
                result.append(row)
                click.echo(row)
    write(NAME, result, about)


if __name__ == "__main__":
    main()

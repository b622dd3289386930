"""python -m bench.over_products: losses on a CPU over the matrix products that they need.

Forward and backward of each headline loss, in turns with the libraries that it is compared with and
with bare panel products by torch: as many as an exact loss needs, from panels that fit the cache,
with nothing between them (`Case.products`). "of products" is the best time over theirs. With
--threads 1 times are the processor's seconds of one thread, which other programs on the machine
lengthen less. Writes over_products.jsonl in bench/results/<device>; rows of other losses, sizes and
numbers of threads stay there.

FASTSIM_AMX=0 leaves a processor's matrix unit out of use: the products of both are then float32.
"""

import time

import click
import torch

from bench.results import FOLDER, write
from bench.tables import markdown, of_rows
from fastsim.backends import get
from fastsim.benchmark import results
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.baselines.baseline import UnavailableError
from fastsim.benchmark.calls import reason, runnable
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.ceilings import bare_products
from fastsim.benchmark.timing import in_turns, summary

NAME, OURS, PRODUCTS = "over_products", "fastsim cpu", "bare products"
BASELINES = {
    "info_nce": ("sentence-transformers",),
    "info_nce symmetric": ("open_clip",),
    "siglip": ("open_clip",),
    "full_triplet": ("eager torch",),
}
KEY = ("loss", "rows", "width", "threads", "by", "kernels")


def measured(loss, rows, width, seconds):
    """The result rows of one loss at one size."""
    case, threads = CASES[loss], torch.get_num_threads()
    clock = time.process_time if threads == 1 else None
    problem = case.problem(rows, width)
    functions, missing = {}, {}
    for name in (OURS, *BASELINES[loss]):
        try:
            call = baseline_named(name).call(problem)
        except UnavailableError as error:
            missing[name] = reason(error)
        else:
            functions[name] = runnable(call, problem, "forward + backward")
    functions[PRODUCTS] = bare_products(rows, width, count=case.products[1])
    found_by = in_turns(functions, seconds=seconds, fewest=3, clock=clock) | missing
    floor = min(found_by[PRODUCTS])
    about = {"loss": loss, "rows": rows, "width": width, "threads": threads}
    about["kernels"] = get("cpu").note().removeprefix(", ")
    for by, found in found_by.items():
        row = about | {"by": by}
        if isinstance(found, str):
            yield row | {"not measured": found}
        else:
            yield row | summary(found) | {"of products": round(min(found) / floor, 3)}


@of_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    found = {}
    for row in rows:
        if "repeats ms" in row and row["threads"] > 1:
            place = row["loss"], row["kernels"]
            found.setdefault(place, {})[row["by"], row["rows"]] = min(row["repeats ms"])
    sizes = sorted({rows for times in found.values() for _, rows in times})
    head = ["loss", "kernels", "beside", *(f"N = {rows:,}" for rows in sizes)]
    lines = [
        [*place, *BASELINES[place[0]], *(_cell(times, place[0], rows) for rows in sizes)]
        for place, times in found.items()
    ]
    return markdown(head, lines, left=3)


def _cell(times, loss, rows):
    """Ours over the products, and the peer's over ours."""
    ours, products, peer = (times.get((by, rows)) for by in (OURS, PRODUCTS, *BASELINES[loss]))
    if not (ours and products):
        return ""
    return f"{ours / products:.2f}" + (f" ({peer / ours:.2f} x)" if peer else "")


@click.command(help=__doc__)
@click.option("--loss", "losses", multiple=True, type=click.Choice([*BASELINES]), default=BASELINES)
@click.option("--rows", multiple=True, type=int, default=(2048, 8192), help="Of either side.")
@click.option("--width", default=384)
@click.option("--seconds", default=8.0, help="For the rounds of one loss at one size.")
@click.option("--threads", type=int, help="By default as many as torch takes.")
def main(losses, rows, width, seconds, threads):
    about = results.environment(settings={"seconds": seconds})  # its device names all threads
    torch.set_num_threads(threads or torch.get_num_threads())
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    kept = results.read(path)[1] if path.is_file() else []
    rows_found = {tuple(row[key] for key in KEY): row for row in kept}
    for loss in losses:
        for count in rows:
            for row in measured(loss, count, width, seconds):
                rows_found[tuple(row[key] for key in KEY)] = row
                click.echo(row)
        write(NAME, list(rows_found.values()), about)


if __name__ == "__main__":
    main()

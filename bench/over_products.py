"""python -m bench.over_products: losses on a CPU over the matrix products that they need.

Forward and backward of each headline loss, in turns with the libraries that it is compared with and
with bare panel products by torch: as many as an exact loss needs, from panels that fit the cache,
with nothing between them (`Case.products`). "of products" is a time over theirs. Writes
over_products.jsonl in bench/results/<device>; rows of other losses and sizes stay there.

FASTSIM_AMX=0 leaves a processor's matrix unit out of use: the products of both are then float32.
"""

import time

import click
import torch

from bench.results import FOLDER, write
from fastsim.backends import get
from fastsim.benchmark import results
from fastsim.benchmark.baselines import baseline_named
from fastsim.benchmark.calls import runnable
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
KEY = ("loss", "rows", "width", "by", "kernels")


def measured(loss, rows, width, seconds, clock):
    """The result rows of one loss at one size."""
    case = CASES[loss]
    problem = case.problem(rows, width)
    functions = {
        name: runnable(baseline_named(name).call(problem), problem, "forward + backward")
        for name in (OURS, *BASELINES[loss])
    }
    functions[PRODUCTS] = bare_products(rows, width, count=case.products[1])
    found_by = in_turns(functions, seconds=seconds, fewest=3, clock=clock)
    floor = min(found_by[PRODUCTS])
    kernels = get("cpu").note().removeprefix(", ")
    for by, found in found_by.items():
        row = {"loss": loss, "rows": rows, "width": width, "by": by, "kernels": kernels}
        if isinstance(found, str):
            yield row | {"not measured": found}
        else:
            yield row | summary(found) | {"of products": round(min(found) / floor, 3)}


@click.command(help=__doc__)
@click.option("--loss", "losses", multiple=True, type=click.Choice([*BASELINES]), default=BASELINES)
@click.option("--rows", multiple=True, type=int, default=(2048, 8192), help="Of either side.")
@click.option("--width", default=384)
@click.option("--seconds", default=8.0, help="For the rounds of one loss at one size.")
@click.option("--one-thread", is_flag=True, help="The processor's seconds of one; writes nothing.")
def main(losses, rows, width, seconds, one_thread):
    about = results.environment(settings={"seconds": seconds})
    if one_thread:
        torch.set_num_threads(1)
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    kept = results.read(path)[1] if path.is_file() else []
    rows_found = {tuple(row[key] for key in KEY): row for row in kept}
    for loss in losses:
        for count in rows:
            clock = time.process_time if one_thread else None
            for row in measured(loss, count, width, seconds, clock):
                rows_found[tuple(row[key] for key in KEY)] = row
                click.echo(row)
        if not one_thread:
            write(NAME, list(rows_found.values()), about)


if __name__ == "__main__":
    main()

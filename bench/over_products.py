"""python -m bench.over_products: the times of losses on a CPU over those of their matrix products.

Times forward + backward of each headline loss, and of InfoNCE with further candidates or label
smoothing, in turns with another library and with bare panel products by torch. These are as many
products as an exact loss needs (`Case.products`), of panels that fit into cache, with nothing
between them. "of products" is the best time over theirs. With --threads 1 times are processor
seconds of one thread, which other programs lengthen less. Writes over_products.jsonl in
bench/results/<device>; rows of other losses, sizes and numbers of threads in the file stay.

FASTSIM_AMX=0 turns the matrix unit off; the products of both are then float32.
"""

import time

import click
import torch

from bench.results import FOLDER, write
from bench.tables import from_rows, markdown
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
    "info_nce own negatives": ("eager torch",),
    "info_nce references": ("eager torch",),
    "info_nce smoothed": ("eager torch",),
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
    times_by = in_turns(functions, seconds=seconds, fewest=3, clock=clock) | missing
    products_time = min(times_by[PRODUCTS])
    about = {"loss": loss, "rows": rows, "width": width, "threads": threads}
    about["kernels"] = get("cpu").note().removeprefix(", ")
    for by, times in times_by.items():
        row = about | {"by": by}
        if isinstance(times, str):
            yield row | {"not measured": times}
        else:
            yield row | summary(times) | {"of products": round(min(times) / products_time, 3)}


@from_rows(NAME)
def table(rows):
    """The table of a device in bench/README.md."""
    best_times = {}
    for row in rows:
        if "repeats ms" in row and row["threads"] > 1:
            place = row["loss"], row["kernels"], row["width"]
            best_times.setdefault(place, {})[row["by"], row["rows"]] = min(row["repeats ms"])
    sizes = sorted({rows for times in best_times.values() for _, rows in times})
    head = ["loss", "kernels", "beside", "D", *(f"N = {rows:,}" for rows in sizes)]
    lines = [
        [loss, kernels, *BASELINES[loss], f"{width:,}", *(_cell(times, loss, n) for n in sizes)]
        for (loss, kernels, width), times in best_times.items()
    ]
    return markdown(head, lines, left=3)


def _cell(times, loss, rows):
    """The time of fastsim over that of the products, and that of the peer over that of fastsim."""
    ours, products, peer = (times.get((by, rows)) for by in (OURS, PRODUCTS, *BASELINES[loss]))
    if not (ours and products):
        return ""
    return f"{ours / products:.2f}" + (f" ({peer / ours:.2f} x)" if peer else "")


@click.command(help=__doc__)
@click.option("--loss", "losses", multiple=True, type=click.Choice([*BASELINES]), default=BASELINES)
@click.option("--rows", multiple=True, type=int, default=(2048, 8192), help="Rows of each side.")
@click.option("--width", default=384, help="Numbers of a row.")
@click.option("--seconds", default=8.0, help="Time for each loss and size.")
@click.option("--threads", type=int, help="Number of threads. Default: that of torch.")
def main(losses, rows, width, seconds, threads):
    # First, as the device's name has the number of threads.
    about = results.environment(settings={"seconds": seconds})
    torch.set_num_threads(threads or torch.get_num_threads())
    path = FOLDER / about["device"] / f"{NAME}.jsonl"
    earlier = results.read(path)[1] if path.is_file() else []
    result = {tuple(row[key] for key in KEY): row for row in earlier}
    for loss in losses:
        for count in rows:
            for row in measured(loss, count, width, seconds):
                result[tuple(row[key] for key in KEY)] = row
                click.echo(row)
        write(NAME, list(result.values()), about)


if __name__ == "__main__":
    main()

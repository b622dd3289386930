"""python -m bench.ranks: estimates the time of a loss on many GPUs. Nothing is measured.

This is the arithmetic of `fastsim plan` with equally many rows on every rank. It compares the bytes
to and from a rank with its products, for gathered candidates and for the ring, and finds the rows
of a rank at which both take the same time. Rates are peaks of data sheets, which no program
reaches. Writes bench/results/ranks.jsonl.
"""

import click

from bench.results import FOLDER
from fastsim.benchmark import results
from fastsim.cli.plan import GATHER, RING, Plan, memory, rounds, times

LINKS = {"NVLink": 450e9, "InfiniBand": 50e9}  # bytes per second in each direction of a GPU
RATE = 989.4e12
ABOUT = {
    "estimate": "on paper: no device has measured any of it",
    "device": "H100 SXM",
    "settings": {"TFLOP/s": RATE / 1e12, **{f"{n} GB/s": link / 1e9 for n, link in LINKS.items()}},
    "source": "NVIDIA H100 and DGX H100 data sheets: bfloat16 without sparsity; NVLink within a"
    " node of 8, 400 Gbit/s InfiniBand a GPU between nodes",
}
RANKS, ROWS, WIDTH = (8, 64, 512), 8192, 1024
LOSS = "info_nce"
FILE = FOLDER / "ranks.jsonl"


def plan_of(ranks, exchange, rows=ROWS):
    """The `Plan` of a step of this many ranks with `rows` rows each."""
    shape = {"batch_size": rows * ranks, "dim": WIDTH, "ranks": ranks, "bytes_each": 2}
    return Plan(**shape, gpu=True, loss=LOSS, exchange=exchange)


def seconds(plan, link):
    """(seconds of the products, seconds of the exchange that the products do not hide)."""
    stages = {stage: value for stage, value, _ in times(plan, RATE, link)}
    return stages["loss"], stages["exchange"]


def rows():
    """A row for each number of ranks, link and exchange."""
    for ranks in RANKS:
        for link, rate in LINKS.items():
            if link == "NVLink" and ranks > 8:
                continue
            for exchange in (GATHER, RING):
                plan = plan_of(ranks, exchange)
                products, waited = seconds(plan, rate)
                sent = sum(size for _, size in rounds(plan))
                yield {
                    **{"loss": LOSS, "rows of a rank": ROWS, "width": WIDTH, "ranks": ranks},
                    **{"link": link, "exchange": exchange, "GB": round(sent / 1e9, 3)},
                    **{"products ms": round(1e3 * products, 3)},
                    **{"link ms": round(1e3 * sent / rate, 3)},
                    **{"loss ms": round(1e3 * (products + waited), 3)},
                    **{"memory GB": round(sum(size for _, size, _ in memory(plan)) / 1e9, 2)},
                }
    for link, rate in LINKS.items():
        for faster, (fewest, most) in crossings(rate):
            yield {"link": link, "faster": faster, "from rows": fewest, "to rows": most}


def crossings(link, ranks=512, most=1 << 20):
    """[(the faster exchange, [fewest, most] rows of a rank)], up to `most` rows of a rank."""
    result, step = [], 64
    for count in range(step, most, step):
        gather, ring = (sum(seconds(plan_of(ranks, way, count), link)) for way in (GATHER, RING))
        faster = GATHER if gather <= ring else RING
        if result and result[-1][0] == faster:
            result[-1][1][1] = count
        else:
            result.append((faster, [count, count]))
    return result


def most_gathered_ranks(capacity):
    """The most ranks (a power of two) of `ROWS` rows whose gathered batch fits into `capacity`.

    capacity: bytes.
    """
    ranks = 1
    while sum(size for _, size, _ in memory(plan_of(2 * ranks, GATHER))) <= capacity:
        ranks *= 2
    return ranks


@click.command()
def main():
    """Write the estimates."""
    about = ABOUT | {"ranks that 80 GB hold gathered": most_gathered_ranks(80e9)}
    results.write(FILE, about, list(rows()))
    click.echo(FILE)


if __name__ == "__main__":
    main()

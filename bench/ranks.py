"""python -m bench.ranks: what the loss of a step takes on many GPUs, on paper. Nothing is measured.

The arithmetic of `fastsim plan` with as many rows on every rank: the bytes to and from a rank
against its products, gathered or around the ring, and the rows of a rank at which the one takes as
long as the other. Peak rates of data sheets, which no program reaches. Writes
bench/results/ranks.jsonl.
"""

import click

from bench.results import FOLDER
from fastsim.benchmark import results
from fastsim.cli.plan import GATHER, RING, Plan, memory, rounds, times

LINKS = {"NVLink": 450e9, "InfiniBand": 50e9}  # bytes a second to a GPU, and as many from it
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
    """A step of so many ranks with as many rows each."""
    shape = {"batch_size": rows * ranks, "dim": WIDTH, "ranks": ranks, "bytes_each": 2}
    return Plan(**shape, gpu=True, loss=LOSS, exchange=exchange)


def seconds(plan, link):
    """(of the products, of the exchange that they do not hide)."""
    found = {stage: value for stage, value, _ in times(plan, RATE, link)}
    return found["loss"], found["exchange"]


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
        for faster, between in crossings(rate):
            yield {"link": link, "faster": faster, "from rows": between[0], "to rows": between[1]}


def crossings(link, ranks=512, most=1 << 20):
    """[(the faster exchange, (from, to) rows of a rank)], by the rows of a rank up to `most`."""
    found, step = [], 64
    for count in range(step, most, step):
        gather, ring = (sum(seconds(plan_of(ranks, way, count), link)) for way in (GATHER, RING))
        faster = GATHER if gather <= ring else RING
        if found and found[-1][0] == faster:
            found[-1][1][1] = count
        else:
            found.append((faster, [count, count]))
    return found


def holds_most(capacity):
    """The most ranks of `ROWS` rows whose gathered candidates fit into so many bytes."""
    ranks = 1
    while sum(size for _, size, _ in memory(plan_of(2 * ranks, GATHER))) <= capacity:
        ranks *= 2
    return ranks


@click.command()
def main():
    """Write the estimates."""
    about = ABOUT | {"ranks that 80 GB hold gathered": holds_most(80e9)}
    results.write(FILE, about, list(rows()))
    click.echo(FILE)


if __name__ == "__main__":
    main()

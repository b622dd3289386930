"""python -m bench.estimates: estimates the time of a loss on a GPU by each backend.

Nothing is measured. This is the arithmetic of `fastsim plan --gpu` at the peak rates of a data
sheet. No program reaches these, so an estimate is a lower bound, and serves to compare backends.
Writes bench/results/estimates.jsonl.
"""

import click

from bench.results import FOLDER
from fastsim.benchmark import results
from fastsim.cli.plan import PANEL_BYTES, Plan, estimates, times

ABOUT = {
    "estimate": "on paper: no device has measured any of it",
    "device": "H100 SXM",
    "settings": {"TFLOP/s": 989.4, "TB/s": 3.35},
    "source": "NVIDIA H100 Tensor Core GPU data sheet: bfloat16 and float16 without sparsity, HBM3",
}
SIZES = (8192, 65_536)
WIDTH = 768
FILE = FOLDER / "estimates.jsonl"


def rows():
    """A row for each size and backend."""
    rate, memory_rate = (1e12 * ABOUT["settings"][name] for name in ("TFLOP/s", "TB/s"))
    for count in SIZES:
        plan = Plan(batch_size=count, dim=WIDTH, bytes_each=2, gpu=True)
        products = next(seconds for stage, seconds, _ in times(plan, rate) if stage == "loss")
        for by, seconds, _ in estimates(plan, rate, memory_rate):
            yield {
                **{"loss": plan.loss, "rows": count, "width": WIDTH, "dtype": "bfloat16", "by": by},
                **{"bytes a score": PANEL_BYTES[by], "products ms": round(1e3 * products, 3)},
                **{"estimated ms": round(1e3 * seconds, 3)},
            }


@click.command()
def main():
    """Write the estimates."""
    results.write(FILE, ABOUT, list(rows()))
    click.echo(FILE)


if __name__ == "__main__":
    main()

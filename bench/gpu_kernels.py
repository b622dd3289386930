"""python -m bench.gpu_kernels: the time of a step on a GPU, and the time of its kernels alone.

The difference is time of the host: torch calls, launches and Python. A training step may hide it
behind other work of the GPU. A step is the forward + backward of bfloat16 rows of 768 features, in
one call or over panels; the time is the median of several steps that each wait for the GPU. torch's
profiler measures the kernels. Writes kernels.jsonl in bench/results/<device>.
"""

import contextlib
import statistics

import click
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu import HEADLINES
from bench.results import write
from bench.tables import from_rows, markdown, milliseconds
from fastsim.benchmark.baselines import ours
from fastsim.benchmark.calls import step
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.options import Integers
from fastsim.benchmark.timing import in_turns
from fastsim.engine.one_call import in_panels

NAME = "kernels"
STEPS, PROFILED = 15, 3
WIDTH = 768
WAYS = {
    "triton": ("triton", contextlib.nullcontext),
    "triton, panels": ("triton", in_panels),
    "cuda, panels": ("cuda", in_panels),
}


def row_of(loss, rows, by):
    """Milliseconds of a step and of its kernels."""
    backend, way = WAYS[by]
    problem = CASES[loss].problem(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    call = ours(backend).call(problem)

    def once():
        with way():
            step(call, problem)
        torch.cuda.synchronize()

    times = in_turns({by: once}, seconds=0, fewest=STEPS)[by]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            once()
    microseconds = sum(
        event.self_device_time_total
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    )
    return {
        **{"loss": loss, "rows": rows, "width": WIDTH, "by": by},
        **{
            "ms": round(1e3 * statistics.median(times), 3),
            "kernels ms": round(1e-3 * microseconds / PROFILED, 3),
        },
    }


@from_rows(NAME)
def table(rows):
    """The times of the step and of its kernels alone, for each loss and size."""
    table_rows = {}
    for row in rows:
        cell = f"{milliseconds(row['ms'])}, {milliseconds(row['kernels ms'])}"
        table_rows.setdefault((row["loss"], row["rows"]), {})[row["by"]] = cell
    lines = [
        [loss, f"{rows:,}", *(cells.get(by, "") for by in WAYS)]
        for (loss, rows), cells in table_rows.items()
    ]
    return markdown(["loss", "N", *WAYS], lines, left=2)


@click.command(help=__doc__)
@click.option("--sizes", type=Integers(), default=(1024, 4096, 8192, 32768), show_default=True)
def main(sizes):
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was measured")
    result = []
    for rows in sizes:
        for loss in HEADLINES:
            for by in WAYS:
                result.append(row_of(loss, rows, by))
                click.echo(result[-1])
    click.echo(f"wrote {write(NAME, result)}")


if __name__ == "__main__":
    main()

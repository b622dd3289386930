"""A whole GPU session in one command: whether losses are correct and repeatable, and how fast.

    python -m bench.gpu [--minutes 8] [--backend triton] [--loss info_nce] [--out FILE]

1. Checks: every loss against float64 at N = 4096 and at ragged sizes, in float32, tf32, float16 and
   bfloat16; two runs, compared bit for bit; a run captured in a CUDA graph. Several processes share
   the GPU, since most of the time goes to compilation, whose results the next stage finds on disk.
2. Times and peak memory of forward + backward from N = 512 to 65,536, D = 768, bfloat16, in turns
   with the baselines of fastsim/benchmark/baselines. Each has its share of the ceiling, the
   library's square product, which is measured first. Headline losses come before other losses.
3. info_nce at N = 1,048,576.

Every stage has a share of the minutes. A measurement that does not fit or fails becomes a row that
says so; none ends the session (bench/workers.py). The rows are those of `fastsim bench`, whose
option `--from` shows them. They are written to bench/results/<device>/gpu.jsonl as they come.
`--device cpu` with small sizes runs everything except graphs and memory.
"""

import functools
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import click
import torch

from bench import gpu_checks, gpu_times
from bench.gpu_checks import OPERANDS, RAGGED, rows_of
from bench.results import FOLDER
from bench.workers import Task, run
from fastsim.backends import backends, get
from fastsim.benchmark import results
from fastsim.benchmark.dtypes import DTYPES
from fastsim.benchmark.options import Integers
from fastsim.benchmark.settings import Settings

HEADLINES = ("info_nce", "info_nce symmetric", "siglip", "full_triplet")
BASELINES = (
    *("eager torch", "torch.compile", "sentence-transformers"),
    *("open_clip", "siglip-kernel", "memeff", "inf-cl", "cut-cross-entropy"),
)
COMPILER = "torch.compile"
CHECKS = ("error", "repeats", "captures")
# Where the stages end, as shares of the minutes.
CHECKED, TIMED, DONE = 0.4, 0.8, 1.0
CHECK_SECONDS, TIME_SECONDS = 100, 90  # a task of a stage that takes longer hangs
ROUNDS_SECONDS = 0.5  # for the rounds of all contestants at one size
LONGEST = 4.0  # a call that is expected to take more seconds, by smaller sizes, is skipped


def kernels(device):
    """The backends that serve tensors on the device, without the dense formulas (eager)."""
    probe = torch.empty(1, device=device)
    return [
        name
        for name in backends()
        if name != "eager" and get(name).unsupported_reason(probe) is None
    ]


def check_tasks(settings, checked, ragged):
    """Every check of every loss and backend, and the compilations that the timed calls need."""
    device, (width,) = settings.device, settings.dims
    checks = (gpu_checks.repeats, gpu_checks.captures)[: 2 if device == "cuda" else 1]
    for case in settings.cases:
        if COMPILER in settings.baselines and case.name in HEADLINES:
            ahead = (settings, case.name, min(settings.sizes), (COMPILER,))
            about = {"measure": "compilation", "loss": case.name, "implementation": COMPILER}
            yield Task(about, gpu_times.compile_ahead, ahead)
        for backend in settings.backends:
            row = functools.partial(gpu_checks.row_of, loss=case.name, backend=backend)
            for shape in ((checked, checked, width), ragged):
                place = dict(zip(("rows", "columns", "width"), shape, strict=True))
                for operand in OPERANDS:
                    arguments = gpu_checks.error, case.name, backend, shape, operand, device
                    yield Task(row("error", operand=operand, **place), rows_of, arguments)
            for check in checks:
                arguments = check, case.name, backend, device
                yield Task(row(check.__name__, operand="bfloat16"), rows_of, arguments)


def ceiling_task(settings, squares):
    return Task({"measure": "ceiling"}, gpu_times.ceiling, (settings.device, squares))


def time_tasks(settings):
    """Every loss at every size; if a process is lost, each contestant is timed alone."""
    (width,) = settings.dims
    first = [case for case in settings.cases if case.name in HEADLINES]
    others = [case for case in settings.cases if case.name not in HEADLINES]
    for rows in settings.sizes:
        about = {"measure": "ceiling", "name": "products", "rows": rows, "width": width}
        yield Task(about, gpu_times.products, (settings, rows, width))
    for cases in (first, others):
        for rows in settings.sizes:
            for case in cases:
                about = {"measure": "time", "loss": case.name, "rows": rows}
                about |= {"width": settings.dims_of(case)[0], "pass": gpu_times.BOTH}
                arguments = settings, case.name, rows
                alone = tuple(
                    Task(
                        about | {"implementation": baseline.name},
                        gpu_times.contest,
                        (*arguments, (baseline.name,)),
                    )
                    for baseline in settings.contestants(case)
                )
                yield Task(about, gpu_times.contest, arguments, alone)


def largest_tasks(settings, rows):
    for backend in settings.backends:
        name = f"fastsim {backend}"
        about = {"measure": "time", "loss": "info_nce", "implementation": name, "rows": rows}
        about |= {"width": settings.dims[0], "pass": gpu_times.BOTH}
        yield Task(about, gpu_times.largest, (settings, name, rows))


class Record:
    """The rows so far, which it writes and prints; times get their share of the ceiling."""

    def __init__(self, path, about):
        self.path, self.about, self.rows = path, about, []

    def note(self, rows):
        for row in rows:
            if row.get("measure") == "time" and "GFLOP/s" in row and self.ceiling:
                row["share of ceiling"] = round(row["GFLOP/s"] / self.ceiling, 4)
            self.rows.append(row)
            click.echo(json.dumps(row))
        results.write(self.path, self.about, self.rows)

    @property
    def ceiling(self):
        """GFLOP/s of the library's best square product, 0 before there is one."""
        squares = [row for row in self.rows if row.get("name") == "square product"]
        return max((row["GFLOP/s"] for row in squares), default=0)


@click.command()
@click.option("--minutes", default=8.0, show_default=True, help="Begin nothing after this time.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--backend", "wanted", multiple=True, help="Backend. Default: all that can run.")
@click.option("--loss", "losses", multiple=True, help="Loss of `fastsim bench`. Default: all.")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    help="Baseline, or none. Default: those that serve large sizes.",
)
@click.option("--sizes", type=Integers(), default=(512, 4096, 32768, 65536), show_default=True)
@click.option("--dim", default=768, show_default=True)
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Dtype of timed calls. Default: as `fastsim bench`."
)
@click.option("--checked", default=4096, show_default=True, help="N at which errors are checked.")
@click.option(
    "--ragged",
    type=Integers(),
    default=RAGGED,
    show_default=True,
    help="N, M, D of a second check.",
)
@click.option(
    "--square",
    "squares",
    type=Integers(),
    default=gpu_times.SQUARES,
    show_default=True,
    help="Rows of the square products whose rate is the ceiling.",
)
@click.option("--largest", default=1 << 20, show_default=True, help="N of the last call.")
@click.option(
    "--seconds", default=ROUNDS_SECONDS, show_default=True, help="Time for each loss and size."
)
@click.option("--workers", default=8, show_default=True, help="Number of processes that check.")
@click.option("--out", metavar="FILE", help="Result file. Default: bench/results/DEVICE/gpu.jsonl.")
def main(
    minutes,
    device,
    wanted,
    losses,
    baselines,
    sizes,
    dim,
    dtype,
    checked,
    ragged,
    squares,
    largest,
    seconds,
    workers,
    out,
):
    """Check losses, time them, then time the largest call; write one result file."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was measured")
    begin = time.monotonic()
    settings = Settings(
        losses=losses,
        backends=wanted or tuple(kernels(device)),
        baselines=baselines or BASELINES,
        sizes=sizes,
        dims=(dim,),
        passes=(gpu_times.BOTH,),
        device=device,
        dtype=dtype or "",
        seconds=seconds,
        limit=LONGEST,
    )
    about = results.environment(device, asdict(settings))
    path = Path(out) if out else FOLDER / about["device"] / "gpu.jsonl"
    record = Record(path, about)
    stage = functools.partial(_stage, record, begin, minutes)
    ahead = replace(settings, seconds=0.0)  # calls that only compile are not timed
    stage(check_tasks(ahead, checked, ragged), CHECKED, workers, CHECK_SECONDS)
    times = [ceiling_task(settings, squares), *time_tasks(settings)]
    stage(times, TIMED, 1, TIME_SECONDS)
    stage(largest_tasks(settings, largest), DONE, 1, 60 * minutes)
    click.echo(f"wrote {path}: {len(record.rows)} rows in {time.monotonic() - begin:.0f} s")
    failed = [row for row in record.rows if row.get("passed") is False]
    missed = [row for row in record.rows if row["measure"] in CHECKS and "passed" not in row]
    lost = [row for row in record.rows if "process lost" in row]
    if failed or missed or lost:
        raise click.ClickException(
            f"{len(failed)} checks failed, {len(missed)} could not be done, {len(lost)} rows lost"
        )


def _stage(record, begin, minutes, tasks, end, workers, seconds):
    deadline = begin + 60 * minutes * end
    run(list(tasks), record.note, workers=workers, deadline=deadline, seconds=seconds)


if __name__ == "__main__":
    main()

"""The block sizes of the Triton backend, timed on the GPU at hand: nothing tunes by itself.

    python -m bench.tune_triton [--depth 768] [--rows 8192] [--columns 32768]

For operands of float16 and tf32, times the passes of two losses with every candidate, prints the
fastest as an entry of fastsim/backends/triton/kernels/table.py, and writes all of them to
bench/results/<device>/tune_triton.jsonl. A candidate that does not build or fit is a line too.
Most of its minutes are compilation.
"""

import itertools
import time

import click
import torch

from bench.compile_report import operand
from bench.results import write
from fastsim.backends import get
from fastsim.backends.triton.kernels import table
from fastsim.pairs import Pairs
from fastsim.tile_loss import TileLoss

TILES = ((64, 128), (128, 64), (128, 128), (128, 256), (256, 128))


def milliseconds(function, seconds):
    """Median by device events after a warm-up."""
    function()
    torch.cuda.synchronize()
    times, deadline = [], time.monotonic() + seconds
    while len(times) < 3 or (time.monotonic() < deadline and len(times) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def candidates(architecture, name):
    """Every BlockSizes worth a try for operands of that kind."""
    described = architecture.startswith("sm_") and int(architecture[3:]) >= 90
    for (rows, columns), warps, stages, width, descriptors in itertools.product(
        TILES, (4, 8), (2, 3, 4), (32, 64), (False, True) if described else (False,)
    ):
        # More scores a thread than its registers hold, or fewer than feed a product of warps.
        if 32 <= rows * columns // (32 * warps) <= 128:
            step = table.LINE // (2 if name == "float16" else 4)
            yield table.BlockSizes(rows, columns, step, 8, warps, stages, width, 0, descriptors)


def passes(rows, columns, depth, dtype, device):
    """{name: callable}: a fused pass of either kind, and the two passes that the softmax's
    replaces.
    """
    backend = get("triton")
    x = torch.randn(rows, depth, device=device).to(dtype)
    y = torch.randn(columns, depth, device=device).to(dtype)
    unit_x, unit_y = (backend.tile_rows(t)[0] for t in (x, y))
    block = slice(0, rows), slice(0, columns)
    workspace = unit_x.new_empty(rows * (columns + 64))  # its rows are padded
    weights = torch.ones(rows, device=device)
    scale, bias = torch.full((2,), 10.0, device=device).unbind()
    positives = TileLoss("softmax", Pairs(torch.arange(rows, device=device)), scale, bias)
    groups = torch.arange(columns, device=device)
    pairs = Pairs(row_groups=groups[:rows], column_groups=groups)
    sigmoid = TileLoss("sigmoid", pairs, scale, bias)
    state = backend.forward(positives, unit_x, unit_y)
    coefficients = positives.coefficients(state, weights.double())
    return {
        "softmax forward reduction": lambda: backend.forward(positives, unit_x, unit_y),
        "softmax score gradient": lambda: backend.score_grad(
            positives, unit_x, unit_y, block, coefficients, workspace
        ),
        "softmax fused pass": lambda: backend.fused_pass(
            positives, unit_x, unit_y, block, weights, workspace
        ),
        "sigmoid fused pass": lambda: backend.fused_pass(
            sigmoid, unit_x, unit_y, block, weights, workspace
        ),
    }


def measured(key, sizes, work):
    """Milliseconds of each pass with these block sizes, or why there are none."""
    table.TABLE[key] = sizes
    try:
        return {name: milliseconds(run, 0.05) for name, run in work.items()}
    except Exception as error:  # registers, shared memory, or the compiler's own limits
        return {"not_measured": f"{type(error).__name__}: {error}"[:200]}


def tune(rows, columns, depth, name, device):
    """One row for each candidate of one operand type."""
    architecture = table.architecture(device)
    key = architecture, name, table.bucket(depth)
    before = dict(table.TABLE)
    common = {"operand": name, "rows": rows, "columns": columns, "depth": depth, "key": key}
    with operand(name) as dtype:
        work = passes(rows, columns, depth, dtype, device)
        try:
            for sizes in candidates(architecture, name):
                yield common | {"sizes": sizes._asdict()} | measured(key, sizes, work)
        finally:
            table.TABLE.clear()
            table.TABLE.update(before)


def entry(rows):
    """The line of the table that the rows of one operand type lead to."""
    timed = [row for row in rows if "not_measured" not in row]
    if not timed:
        raise click.ClickException("no candidate ran")
    best = min(timed, key=lambda row: row["softmax fused pass"] + row["sigmoid fused pass"])
    # To spare a product pays at this depth if it beats two products.
    two_passes = best["softmax forward reduction"] + best["softmax score gradient"]
    pays = best["softmax fused pass"] < two_passes
    spare = best["depth"] if pays else 2 * best["depth"]
    sizes = table.BlockSizes(**best["sizes"] | {"spare": spare})
    return f"    {tuple(best['key'])!r}: {sizes!r},"


@click.command()
@click.option("--rows", default=8192, show_default=True)
@click.option("--columns", default=32768, show_default=True)
@click.option("--depth", default=768, show_default=True)
def main(rows, columns, depth):
    """Time every candidate; print the table's entries."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was tuned")
    device = torch.device("cuda", torch.cuda.current_device())
    found, entries = [], []
    for name in ("float16", "tf32"):
        first = len(found)
        for row in tune(rows, columns, depth, name, device):
            found.append(row)
            click.echo(row)
        path = write("tune_triton", found)
        entries.append(entry(found[first:]))
    click.echo("\n".join([f"wrote {path}; the entries of the table:", *entries]))


if __name__ == "__main__":
    main()

"""Times block sizes of the Triton backend on this machine's GPU. The backend itself tunes nothing.

    python -m bench.tune_triton [--depth 768] [--rows 8192] [--columns 32768]

For operands of float16 and tf32 it times the passes of two losses with every candidate, prints the
fastest as an entry of fastsim/backends/triton/kernels/table.py, and writes all of them to
bench/results/<device>/tune_triton.jsonl, also those that do not compile or fit. Compilation takes
most of the time.
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
    """The median time of a call by device events, after a warm-up."""
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
    """Every `BlockSizes` that may be fast for operands of that kind."""
    has_descriptors = architecture.startswith("sm_") and int(architecture[3:]) >= 90
    for (rows, columns), warps, stages, width, descriptors in itertools.product(
        TILES, (4, 8), (2, 3, 4), (32, 64), (False, True) if has_descriptors else (False,)
    ):
        # Not more scores of a thread than its registers hold, nor too few to feed a warp's product.
        if 32 <= rows * columns // (32 * warps) <= 128:
            step = table.LINE // (2 if name == "float16" else 4)
            yield table.BlockSizes(rows, columns, step, 8, warps, stages, width, 0, descriptors)


def passes(rows, columns, depth, dtype, device):
    """{name: function}: the fused passes of softmax and sigmoid, and the two passes that the former
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
    """Milliseconds of each pass with these block sizes, or the reason why there are none."""
    table.TABLE[key] = sizes
    try:
        return {name: milliseconds(run, 0.05) for name, run in work.items()}
    except Exception as error:  # too many registers, too much shared memory, a compiler's limit
        return {"not_measured": f"{type(error).__name__}: {error}"[:200]}


def tune(rows, columns, depth, name, device):
    """A row for each candidate for one type of operands."""
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
    """The line of the table with the fastest candidate for one type of operands."""
    timed = [row for row in rows if "not_measured" not in row]
    if not timed:
        raise click.ClickException("no candidate ran")
    best = min(timed, key=lambda row: row["softmax fused pass"] + row["sigmoid fused pass"])
    # Sparing a product pays at this depth if the fused pass is faster than the two passes.
    two_passes = best["softmax forward reduction"] + best["softmax score gradient"]
    pays = best["softmax fused pass"] < two_passes
    break_even = best["depth"] if pays else 2 * best["depth"]
    sizes = table.BlockSizes(**best["sizes"] | {"break_even": break_even})
    return f"    {tuple(best['key'])!r}: {sizes!r},"


@click.command()
@click.option("--rows", default=8192, show_default=True)
@click.option("--columns", default=32768, show_default=True)
@click.option("--depth", default=768, show_default=True)
def main(rows, columns, depth):
    """Time every candidate and print entries of the table."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was tuned")
    device = torch.device("cuda", torch.cuda.current_device())
    result, entries = [], []
    for name in ("float16", "tf32"):
        first = len(result)
        for row in tune(rows, columns, depth, name, device):
            result.append(row)
            click.echo(row)
        path = write("tune_triton", result)
        entries.append(entry(result[first:]))
    click.echo("\n".join([f"wrote {path}; the entries of the table:", *entries]))


if __name__ == "__main__":
    main()

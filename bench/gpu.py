"""The whole GPU session in one command: is it right, is it repeatable, how fast is it.

    python -m bench.gpu [--minutes 8] [--backends triton,cuda]

1. Every loss against float64 at N = 4096 and on ragged sizes, float32, float16 and bfloat16.
2. Two runs bit for bit, and a run captured in a CUDA graph.
3. Time and peak memory of forward + backward from N = 512 to 65,536, D = 768, bfloat16, beside the
   eager formula, torch.compile of it and the peers of bench/peers.py, each with its share of the
   ceiling: the library product measured in the same run. Last, info_nce at N = 1,048,576.

Writes bench/results/<device>/gpu.jsonl as it goes, with device, versions and commit.
Work per call in u = N M D: a product is 2u FLOP.
"""

import functools
import json
import time
from typing import Any, NamedTuple

import click
import torch

from bench.peers import PEERS
from bench.results import write
from fastsim import losses
from fastsim.backends import backends, get

SIZES = (512, 4096, 32768, 65536)
LARGEST = 1 << 20
DEPTH = 768
RAGGED = (1000, 1537, 100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """call(x, y, backend=...) and the FLOP of forward + backward in u, whoever does them.

    selects: which scores count is decided by comparing them, so that rounding may decide
    otherwise and the gradients of 16-bit inputs are no measure.
    """

    call: Any
    work: int
    selects: bool = False


CASES = {
    "siglip": Case(lambda x, y, **k: losses.siglip(x, y, **k), 6),
    "info_nce": Case(lambda x, y, **k: losses.info_nce(x, y, **k), 6),
    "info_nce symmetric": Case(lambda x, y, **k: losses.info_nce(x, y, symmetric=True, **k), 8),
    "full_triplet": Case(lambda x, y, **k: losses.full_triplet(x, y, **k), 2, selects=True),
    "sup_con": Case(
        lambda x, y, **k: losses.sup_con(x, torch.arange(len(x), device=x.device) // 4, **k), 6
    ),
    "matrix_cross_entropy": Case(lambda x, y, **k: losses.matrix_cross_entropy(x, y, None, **k), 6),
    "matrix_mse": Case(lambda x, y, **k: losses.matrix_mse(x, y, None, **k), 6),
    "cosent_matrix": Case(lambda x, y, **k: losses.cosent_matrix(x, y, None, **k), 8),
}
COMPILED = ("siglip", "info_nce", "info_nce symmetric", "full_triplet")  # each takes its seconds


def kernels():
    """The names of the backends that serve GPU tensors here, the dense formulas left out."""
    probe = torch.empty(1, device="cuda")
    return [name for name in backends() if name != "eager" and get(name).objection(probe) is None]


def inputs(rows, columns, depth, dtype, noise=1.0):
    """x, and y whose row i is like x's."""
    x = torch.randn(rows, depth, device="cuda")
    y = torch.randn(columns, depth, device="cuda")
    y[:rows] = x[:columns] + noise * y[:rows]
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


def step(call, x, y):
    """The loss, and its gradients in x.grad and y.grad."""
    x.grad = y.grad = None
    loss = call(x, y)
    loss.backward()
    return loss


def outputs(call, x, y):
    """[loss, dx, dy (where there is one)], detached."""
    loss = step(call, x, y)
    return [loss.detach(), x.grad, *([] if y.grad is None else [y.grad])]


# ---- 1, 2: right and repeatable ----


def errors(name, backend, shape, dtype):
    """Relative errors (norm) of loss and gradients: [ours, the eager formula's]."""
    case = CASES[name]
    x, y = inputs(*shape, dtype)
    mine = outputs(functools.partial(case.call, backend=backend), x, y)
    formula = functools.partial(case.call, backend="eager")
    eager = outputs(formula, x, y)
    truth = outputs(formula, *(t.detach().double().requires_grad_() for t in (x, y)))
    found = {}
    for part, *results, t in zip(("loss", "dx", "dy"), mine, eager, truth, strict=False):
        found[part] = [((v.double() - t).norm() / t.norm()).item() for v in results]
    judged = ["loss"] if case.selects and dtype.itemsize == 2 else list(found)
    # Beside the formula's own error, the rounding of operands and slopes to float16.
    rounding = torch.finfo(torch.float16 if dtype.itemsize == 2 else torch.float32).eps
    passed = all(found[p][0] <= 2 * (found[p][1] + rounding) for p in judged)
    return {"relative_error": found, "judged": judged, "passed": passed}


def repeats(name, backend):
    """Whether two runs agree bit for bit."""
    call = functools.partial(CASES[name].call, backend=backend)
    x, y = inputs(3000, 3100, DEPTH, torch.bfloat16)
    first, second = outputs(call, x, y), outputs(call, x, y)
    return {"passed": all(map(torch.equal, first, second))}


def captures(name, backend):
    """Whether a captured run gives, on other inputs, what a plain run gives."""
    call = functools.partial(CASES[name].call, backend=backend)
    x, y = inputs(512, 512, DEPTH, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(call, x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = y.grad = None
    with torch.cuda.graph(graph):
        loss = call(x, y)
        loss.backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [loss.detach().clone(), x.grad.clone()]
    return {"passed": all(map(torch.equal, replayed, outputs(call, x, y)[:2]))}


def shapes(name):
    """The sizes of the check of errors; sup_con's one side cannot be rectangular."""
    ragged = (RAGGED[0], RAGGED[0], RAGGED[2]) if name == "sup_con" else RAGGED
    return (4096, 4096, DEPTH), ragged


def checks(names):
    """One row for each check of each backend."""
    for backend in names:
        for name in CASES:
            common = {"backend": backend, "loss": name}
            for shape in shapes(name):
                for dtype in DTYPES:
                    row = errors(name, backend, shape, dtype)
                    yield common | {"check": "error", "shape": shape, "dtype": str(dtype)} | row
            yield common | {"check": "repeats"} | repeats(name, backend)
            yield common | {"check": "captures"} | captures(name, backend)


# ---- 3: time and memory ----


def milliseconds(function, seconds=0.4):
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


def extra_bytes(function):
    """Peak memory of a call beyond what was there before, which holds inputs and gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceiling():
    """FLOP/s of the library's float16 product, the largest of a few shapes."""
    best = 0.0
    for rows in (8192, 16384):
        a, b = (torch.randn(rows, rows, device="cuda", dtype=torch.float16) for _ in "ab")
        best = max(best, 2 * rows**3 / (1e-3 * milliseconds(functools.partial(torch.mm, a, b))))
    return best


def contestants(name, names):
    """(who, call(x, y)) of a loss."""
    call = CASES[name].call
    for backend in names:
        yield f"fastsim {backend}", functools.partial(call, backend=backend)
    eager = functools.partial(call, backend="eager")
    yield "eager", eager
    if name in COMPILED:
        yield "torch.compile", torch.compile(eager, dynamic=False)
    yield from PEERS.get(name, {}).items()


def timed(who, call, name, rows, top):
    """Time, memory and share of the ceiling, or why there is none."""
    common = {"who": who, "loss": name, "rows": rows, "depth": DEPTH, "dtype": "bfloat16"}
    try:
        x, y = inputs(rows, rows, DEPTH, torch.bfloat16)
        run = functools.partial(step, call, x, y)
        taken = milliseconds(run)
        memory = extra_bytes(run)
    except Exception as error:  # a rival's, of whatever kind, is a line of the results
        torch.cuda.empty_cache()
        return common | {"not_measured": f"{type(error).__name__}: {error}"[:300]}
    share = CASES[name].work * rows * rows * DEPTH / (1e-3 * taken) / top
    return common | {"ms": taken, "extra_bytes": memory, "share_of_ceiling": share}


def times(names, top, deadline):
    """One row for each contestant at each size, as long as there is time."""
    plan = [
        (rows, name, who) for rows in SIZES for name in CASES for who in contestants(name, names)
    ]
    plan += [
        (LARGEST, "info_nce", who)
        for who in contestants("info_nce", names)
        if who[0].startswith("fastsim")
    ]
    for rows, name, (who, call) in plan:
        if time.monotonic() < deadline:
            yield timed(who, call, name, rows, top)


# ---- the session ----


@click.command()
@click.option("--minutes", default=8.0, help="Stop starting measurements after this long.")
@click.option("--backends", "wanted", default="", help="Names, by default all that can run.")
@click.option("--out", default="gpu", show_default=True, help="name of the result file")
def main(minutes, wanted, out):
    """Correctness, then times; one results file."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was measured")
    deadline = time.monotonic() + 60 * minutes
    names = [name for name in wanted.split(",") if name] or kernels()
    torch.manual_seed(0)
    rows = []

    def note(row):
        rows.append(row)
        write(out, rows)
        click.echo(json.dumps(row))

    for row in checks(names):
        note(row)
    top = ceiling()
    note({"ceiling_flops": top, "operands": "float16"})
    for row in times(names, top, deadline):
        note(row)
    failed = [row for row in rows if row.get("passed") is False]
    if failed:
        raise click.ClickException(f"{len(failed)} checks failed")


if __name__ == "__main__":
    main()

"""The whole GPU session in one command: is it right, is it repeatable, how fast is it.

    python -m bench.gpu [--minutes 8] [--results bench/results]

1. Every loss against float64 at N = 4096 and on ragged sizes, float32, float16 and bfloat16.
2. Two runs bit for bit, and a run captured in a CUDA graph.
3. Time and peak memory of forward + backward at N = 4096, 32,768 and 65,536, D = 768, beside the
   eager formula, torch.compile of it, sentence-transformers and inf-cl where they are installed,
   each with its share of the ceiling: the library product measured in the same run.

Writes one line per measurement to <results>/<device>/gpu.jsonl, with device, versions and commit.
Work per call, u = N M D: a product is 2u FLOP, forward + backward as fastsim/tiles.py needs it.
"""

import functools
import json
import subprocess
import time
from pathlib import Path

import click
import torch

import fastsim
from fastsim import losses

SIZES = (4096, 32768, 65536)
DEPTH = 768
RAGGED = (1000, 1537, 100)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# name -> (call(x, y, backend), FLOP of forward + backward in u = N M D)
CASES = {
    "siglip": (lambda x, y, **k: losses.siglip(x, y, **k), 6),
    "info_nce": (lambda x, y, **k: losses.info_nce(x, y, **k), 8),
    "info_nce symmetric": (lambda x, y, **k: losses.info_nce(x, y, symmetric=True, **k), 8),
    "full_triplet": (lambda x, y, **k: losses.full_triplet(x, y, **k), 2),
    "sup_con": (
        lambda x, y, **k: losses.sup_con(x, torch.arange(len(x), device=x.device) // 4, **k),
        8,
    ),
    "matrix_cross_entropy": (lambda x, y, **k: losses.matrix_cross_entropy(x, y, None, **k), 8),
    "matrix_mse": (lambda x, y, **k: losses.matrix_mse(x, y, None, **k), 6),
    "cosent_matrix": (lambda x, y, **k: losses.cosent_matrix(x, y, None, **k), 8),
}


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


def errors(name, shape, dtype):
    """Relative errors (norm) of the loss and gradients, of Triton and of the eager formula."""
    call, _ = CASES[name]
    x, y = inputs(*shape, dtype)
    mine = outputs(functools.partial(call, backend="triton"), x, y)
    eager = outputs(functools.partial(call, backend="eager"), x, y)
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    truth = outputs(functools.partial(call, backend="eager"), *wide)
    found = {}
    for part, a, b, t in zip(("loss", "dx", "dy"), mine, eager, truth, strict=False):
        found[part] = [((v.double() - t).norm() / t.norm()).item() for v in (a, b)]
    # Beside the formula's own error, the rounding of operands and slopes to float16.
    rounding = torch.finfo(torch.float16 if dtype.itemsize == 2 else torch.float32).eps
    passed = all(ours <= 2 * (formula + rounding) for ours, formula in found.values())
    return {"relative_error": found, "passed": passed}


def repeats(name):
    """Whether two runs agree bit for bit."""
    call = functools.partial(CASES[name][0], backend="triton")
    x, y = inputs(3000, 3100, DEPTH, torch.bfloat16)
    first, second = outputs(call, x, y), outputs(call, x, y)
    return {"passed": all(map(torch.equal, first, second))}


def captures(name):
    """Whether a captured run gives, on other inputs, what a plain run gives."""
    call = functools.partial(CASES[name][0], backend="triton")
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


# ---- 3: time and memory ----


def milliseconds(function, seconds=0.7):
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
    """Peak memory of a call beyond what was there before and the gradients it leaves."""
    function()
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
        best = max(best, 2 * rows**3 / (1e-3 * milliseconds(lambda: a @ b)))  # noqa: B023
    return best


def sentence_transformers_nce(x, y):
    """Its in-batch negatives loss on embeddings at hand."""
    from sentence_transformers import losses as theirs

    loss = theirs.MultipleNegativesRankingLoss(model=None)
    return loss.compute_loss_from_embeddings([x, y], None)


def inf_cl_nce(x, y):
    from inf_cl import cal_inf_loss

    norm = torch.nn.functional.normalize
    return cal_inf_loss(norm(x), norm(y), scale=torch.tensor(20.0, device=x.device))


# loss -> rival -> call(x, y); the dense formula and its compilation are there for every loss.
RIVALS = {
    "info_nce": {"sentence-transformers": sentence_transformers_nce, "inf-cl": inf_cl_nce},
}


def contestants(name):
    """(who, call(x, y)) of a loss."""
    call, _ = CASES[name]
    yield "fastsim triton", functools.partial(call, backend="triton")
    eager = functools.partial(call, backend="eager")
    yield "eager", eager
    yield "torch.compile", torch.compile(eager)
    yield from RIVALS.get(name, {}).items()


def timed(who, call, name, rows, top):
    """Time, memory and share of the ceiling, or why there is none."""
    work = CASES[name][1] * rows * rows * DEPTH
    try:
        x, y = inputs(rows, rows, DEPTH, torch.bfloat16)
        run = functools.partial(step, call, x, y)
        taken = milliseconds(run)
        memory = extra_bytes(run)
    except (ImportError, torch.OutOfMemoryError, RuntimeError, TypeError, AttributeError) as error:
        torch.cuda.empty_cache()
        return {"who": who, "not_measured": f"{type(error).__name__}: {error}"[:300]}
    share = work / (1e-3 * taken) / top
    return {"who": who, "ms": taken, "extra_bytes": memory, "share_of_ceiling": share}


# ---- the session ----


def environment():
    """What every line of the results carries."""
    import triton

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fastsim": fastsim.__version__,
        "commit": commit.stdout.strip(),
    }


@click.command()
@click.option("--minutes", default=8.0, help="Stop starting measurements after this long.")
@click.option("--results", default="bench/results", type=click.Path(path_type=Path))
def main(minutes, results):
    """Correctness, then times; one results file."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was measured")
    started = time.monotonic()
    common = environment()
    folder = results / common["device"].lower().replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    with (folder / "gpu.jsonl").open("w") as file:

        def note(**row):
            file.write(json.dumps(common | row) + "\n")
            file.flush()
            click.echo(json.dumps(row))
            if row.get("passed") is False:
                failed.append(row)

        for name in CASES:
            for shape in ((4096, 4096, DEPTH), RAGGED):
                for dtype in DTYPES:
                    if name == "sup_con" and shape == RAGGED:
                        continue  # one side only: its sizes are ragged in the tests
                    row = errors(name, shape, dtype)
                    note(check="error", loss=name, shape=shape, dtype=str(dtype), **row)
            note(check="repeats", loss=name, **repeats(name))
            note(check="captures", loss=name, **captures(name))
        top = ceiling()
        note(ceiling_flops=top, operands="float16")
        for rows in SIZES:
            for name in CASES:
                for who, call in contestants(name):
                    if time.monotonic() - started < 60 * minutes:
                        row = timed(who, call, name, rows, top)
                        note(loss=name, rows=rows, depth=DEPTH, dtype="bfloat16", **row)
    if failed:
        raise click.ClickException(f"{len(failed)} checks failed")


if __name__ == "__main__":
    main()

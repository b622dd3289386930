"""The ceilings of the machine: the rates of single operations, measured without any loss."""

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.calls import runnable
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.timing import in_turns, summary

BAND = {"cpu": 512, "cuda": 4096}  # rows of the reused panel of scores
PANEL = {"cpu": (512, 2048), "cuda": (4096, 16384)}  # fits into a cache, or keeps a GPU busy


def bare_products(rows, width, *, count=3, device="cpu", dtype=torch.float32):
    """A function that does only the products of an exact loss, by the library, panel by panel.

    These are the scores, the gradient of x and the gradient of y, written to existing memory:
    6 N^2 D operations. count: the number of products (`Case.products`): 1 means the scores alone,
    4 means that the scores are computed twice.
    """
    x, y = (normalize(leaf.detach(), dim=1) for leaf in _info_nce(rows, width, device, dtype))
    tall = min(rows, BAND[device])
    panel = torch.empty(tall, rows, device=device, dtype=dtype)
    grad_x, grad_y = torch.empty_like(x), torch.zeros_like(y)

    def run():
        for top in range(0, rows, tall):
            part = x[top : top + tall]
            scores = panel[: len(part)]
            for _ in range(max(1, count - 2)):
                torch.mm(part, y.T, out=scores)
            if count == 1:
                continue
            torch.mm(scores, y, out=grad_x[top : top + tall])
            grad_y.addmm_(scores.T, part)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def _info_nce(rows, width, device, dtype):
    return CASES["info_nce"].problem(rows, width, device=device, dtype=dtype).leaves


def product_rows(rows, width, *, device="cpu", dtype=torch.float32, seconds=1.0):
    """The result row of the library's products at one size."""
    function = bare_products(rows, width, device=device, dtype=dtype)
    times = summary(in_turns({"": function}, seconds=seconds)[""])
    rate = float(f"{6 * rows * rows * width / (1e6 * min(times['repeats ms'])):.5g}")
    return {"name": "products", "rows": rows, "width": width, **times, "GFLOP/s": rate}


def machine_rows(*, device="cpu", seconds=1.0):
    """Result rows of the rates that the scaling model needs besides products.

    copy: bytes per second that a copy larger than any cache reads and writes. exp: exponentials per
    second in a panel of scores.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)
    panel = torch.zeros(PANEL[device], device=device)
    out = torch.empty_like(panel)
    functions = {
        "copy": lambda: (target.copy_(source), wait()),
        "exp": lambda: (torch.exp(panel, out=out), wait()),
    }
    work = {"copy": ("GB/s", 2 * source.nbytes), "exp": ("G/s", panel.numel())}
    times = in_turns(functions, seconds=seconds)
    rows = []
    for name, (unit, amount) in work.items():
        row = summary(times[name])
        rate = amount / (1e6 * min(row["repeats ms"]))
        rows.append({"name": name, **row, unit: round(rate, 3)})
    return rows


def call_rows(loss, baselines, options, *, seconds=0.2):
    """Result rows of a call with next to no work: two rows of width two.

    options: those of `Case.problem`.
    """
    problem = CASES[loss].problem(2, 2, **options)
    functions = {
        baseline.name: runnable(baseline.call(problem), problem, "forward + backward")
        for baseline in baselines
    }
    times = in_turns(functions, seconds=seconds)
    return [
        {"name": "call", "loss": loss, "implementation": name, **summary(rounds)}
        for name, rounds in times.items()
        if isinstance(rounds, list)
    ]

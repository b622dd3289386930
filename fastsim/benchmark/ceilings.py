"""What the machine can do at best, measured without any loss: the floors that times stand on."""

import torch
from torch.nn.functional import normalize

from fastsim.benchmark.calls import runnable
from fastsim.benchmark.cases import CASES
from fastsim.benchmark.timing import in_turns, summary

BAND = {"cpu": 512, "cuda": 4096}  # rows of the reused panel of scores
PANEL = {"cpu": (512, 2048), "cuda": (4096, 16384)}  # scores at hand, and enough to keep it busy


def bare_products(rows, width, *, count=3, device="cpu", dtype=torch.float32):
    """A function that does the products of an exact loss, a panel at a time.

    Scores, the gradient of x and the gradient of y, by the library, into buffers that are there:
    6 N^2 D operations, and nothing between them. count: of products (`Case.products`), the scores
    alone with 1, the scores twice with 4.
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
    """The result row of the library's product at one size."""
    function = bare_products(rows, width, device=device, dtype=dtype)
    found = summary(in_turns({"": function}, seconds=seconds)[""])
    rate = float(f"{6 * rows * rows * width / (1e6 * min(found['repeats ms'])):.5g}")
    return {"name": "products", "rows": rows, "width": width, **found, "GFLOP/s": rate}


def machine_rows(*, device="cpu", seconds=1.0):
    """Result rows of what the scaling model needs beside products.

    copy: bytes read and written per second by a copy larger than any cache. exp: exponentials
    per second in a panel of scores.
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
    found = in_turns(functions, seconds=seconds)
    rows = []
    for name, (unit, amount) in work.items():
        row = summary(found[name])
        rate = amount / (1e6 * min(row["repeats ms"]))
        rows.append({"name": name, **row, unit: round(rate, 3)})
    return rows


def call_rows(loss, baselines, inputs, *, seconds=0.2):
    """Result rows of a call that has nothing to do: two rows of the least width.

    inputs: options of `Case.problem`.
    """
    problem = CASES[loss].problem(2, 2, **inputs)
    functions = {
        r.name: runnable(r.call(problem), problem, "forward + backward") for r in baselines
    }
    found = in_turns(functions, seconds=seconds)
    return [
        {"name": "call", "loss": loss, "implementation": name, **summary(times)}
        for name, times in found.items()
        if isinstance(times, list)
    ]

"""python -m bench.memory: how far a loss raises the peak memory of a fresh process.

The rise of the resident set's high-water mark over forward and backward, less the inputs, which
were there before, and the gradients, which are the result. One N x N float32 matrix at 16,384 is
1,024 MB. The C allocator is told to give freed blocks back to the system at once
(MALLOC_MMAP_THRESHOLD_), so that the figure is what is alive and not what it keeps for later.
"""

import json
import os
import subprocess
import sys

import click

from bench.results import write

LOSSES = {
    "info_nce": "fastsim.info_nce(x, y, **options)",
    "info_nce symmetric": "fastsim.info_nce(x, y, symmetric=True, **options)",
    "sup_con": "fastsim.sup_con(x, groups, **options)",
    "siglip": "fastsim.siglip(x, y, **options)",
    "matrix_cross_entropy": "fastsim.matrix_cross_entropy(x, y, (groups, groups), **options)",
    "matrix_mse": "fastsim.matrix_mse(x, y, (groups, groups), **options)",
    "cosent_matrix": "fastsim.cosent_matrix(x, y, (groups, groups), **options)",
    "full_triplet": "fastsim.full_triplet(x, y, **options)",
}

PROCESS = """
import json, resource, sys
import torch, fastsim
call, rows, width, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
options = {"backend": backend}

def run(rows):
    x = torch.randn(rows, width, requires_grad=True)
    y = torch.randn(rows, width, requires_grad=True)
    groups = torch.arange(rows) // 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    eval(call).backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradients = sum(t.grad.nbytes for t in (x, y) if t.grad is not None)
    return (after - before) / 1024 - gradients / 2**20

run(256)
print(json.dumps(run(rows)))
"""


def rise(name, rows, width, backend):
    """MB (2^20) by which the loss raises the peak beyond inputs and gradients."""
    command = [sys.executable, "-c", PROCESS, LOSSES[name], str(rows), str(width), backend]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


@click.command()
@click.option("--rows", default="8192,16384", show_default=True)
@click.option("--width", default=384, show_default=True)
@click.option("--backends", default="cpu,eager", show_default=True)
@click.option("--out", default="memory", show_default=True, help="name of the result file")
def main(rows, width, backends, out):
    """Measure, print, and write bench/results/<device>/<out>.jsonl."""
    results = []
    for backend in backends.split(","):
        for name in LOSSES:
            if backend == "eager" and name == "cosent_matrix":
                continue  # its dense formula holds (N M)^2 pairs
            for count in map(int, rows.split(",")):
                value = rise(name, count, width, backend)
                results.append(
                    {"name": name, "backend": backend, "rows": count, "width": width}
                    | {"rise MB": round(value, 1)}
                )
                click.echo(f"{backend:6} {name:22} {count:6} x {width}   {value:8.1f} MB")
    click.echo(f"wrote {write(out, results)}")


if __name__ == "__main__":
    main()

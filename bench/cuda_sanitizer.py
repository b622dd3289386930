"""Runs the CUDA kernels under compute-sanitizer on small shapes.

    python -m bench.cuda_sanitizer [--tool memcheck] [--tool racecheck]

For each tool a process runs every loss forward and backward; the result is one line of JSON.
"""

import json
import shutil
import subprocess
import sys

import click
import torch

TOOLS = ("memcheck", "racecheck")
SHAPES = ((67, 75, 34), (260, 300, 96))


def sanitizer():
    """The path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer")


def losses_once():
    """Every loss of the CUDA backend, forward and backward, with the operands of both engines."""
    from fastsim import losses

    for rows, columns, depth in SHAPES:
        for dtype in (torch.float16, torch.float32):
            x, y = (torch.randn(n, depth, device="cuda").to(dtype) for n in (rows, columns))
            leaves = x.requires_grad_(), y[:rows].clone().requires_grad_()
            ids = torch.randint(0, 9, (rows,), device="cuda")
            targets = torch.randint(0, 2, (rows, rows), device="cuda").to(torch.int8)
            for name, options in (
                ("info_nce", {"symmetric": True, "exclude": (ids, ids), "margin": 0.1}),
                ("info_nce", {}),
                ("siglip", {"targets": targets}),
                ("siglip", {}),
                ("matrix_mse", {"targets": (ids, ids)}),
                ("matrix_cross_entropy", {"targets": targets}),
                ("full_triplet", {}),
                ("cosent_matrix", {"targets": (ids, ids)}),
            ):
                getattr(losses, name)(*leaves, **options, backend="cuda").backward()
            scores = torch.randn(5000, device="cuda", requires_grad=True)
            losses.cosent(scores, torch.randn(5000, device="cuda"), backend="cuda").backward()
    torch.cuda.synchronize()


def sanitize(tool):
    """The result of a tool for `losses_once`."""
    run = [sys.executable, "-c", "from bench.cuda_sanitizer import losses_once; losses_once()"]
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "9", *run]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"check": tool, "backend": "cuda", "passed": done.returncode == 0, "said": lines[-1:]}


@click.command()
@click.option("--tool", "tools", multiple=True, default=TOOLS, type=click.Choice(TOOLS))
def main(tools):
    """Print one line for each tool; fail if a tool finds an error."""
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU is visible; nothing was checked")
    if sanitizer() is None:
        raise click.ClickException("no compute-sanitizer; it comes with the CUDA toolkit")
    rows = [sanitize(tool) for tool in tools]
    for row in rows:
        click.echo(json.dumps(row))
    if not all(row["passed"] for row in rows):
        raise click.ClickException("a tool found errors")


if __name__ == "__main__":
    main()

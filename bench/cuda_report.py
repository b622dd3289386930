"""What each CUDA kernel takes: registers, shared memory, local memory, by architecture.

    python -m bench.cuda_report [--library fastsim/_lib/cuda.so]

reads the built library with cuobjdump, so no GPU has to be there. Local memory is where registers
spill; a kernel that another engine serves on an architecture is left out.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import click

from fastsim.backends.cuda.backend import LIBRARY

EMPTY = 8  # registers: a kernel without code has fewer


class Kernel(NamedTuple):
    """One kernel on one architecture; bytes of shared, stack and local memory."""

    architecture: str
    engine: str
    product: str
    epilogue: str
    registers: int
    shared: int
    stack: int
    local: int

    @property
    def tiles(self):
        return self.engine in ("hopper", "portable")


@functools.cache
def cuobjdump():
    """The tool's path: the toolkit's, or the one that comes with Triton; None without either."""
    if found := shutil.which("cuobjdump"):
        return found
    if nvcc := shutil.which("nvcc"):
        beside = Path(nvcc).resolve().parent / "cuobjdump"
        if beside.exists():
            return str(beside)
    if spec := importlib.util.find_spec("triton"):
        path = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        return str(path) if path.exists() else None
    return None


def dump(*options, library=LIBRARY):
    """What cuobjdump prints."""
    command = [cuobjdump(), *options, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kernels(library=LIBRARY):
    """[Kernel] of everything in the library that has code."""
    found, architecture = [], ""
    lines = dump("--dump-resource-usage", library=library).splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := re.match(r"arch = (\S+)", line):
            architecture = match[1]
        if match := re.match(r"\s*Function (\S+):", line):
            numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", following))
            taken = [int(numbers[key]) for key in ("REG", "SHARED", "STACK", "LOCAL")]
            if taken[0] >= EMPTY:
                found.append(Kernel(architecture, *_names(match[1]), *taken))
    return found


def _names(symbol):
    """(engine, product, epilogue) of a mangled name: identifiers follow their lengths."""
    words, at = [], 0
    while match := re.compile(r"\d+").search(symbol, at):
        at = match.end() + int(match[0])
        words.append(symbol[match.end() : at])
    if "hopper_tiles" in words:
        return "hopper", "Half", words[words.index("hopper_tiles") + 1]
    if "portable_tiles" in words:
        product, epilogue = words[words.index("portable_tiles") + 2 :][:2]
        return "portable", product, epilogue
    return "", "", next((word for word in words if word.endswith("_kernel")), symbol)


@click.command()
@click.option("--library", default=LIBRARY, type=click.Path(path_type=Path))
def main(library):
    """The table of all kernels."""
    if not library.exists():
        raise click.ClickException(f"{library} is not there; FASTSIM_BUILD=cuda builds it")
    if cuobjdump() is None:
        raise click.ClickException("no cuobjdump; it comes with the CUDA toolkit and with Triton")
    layout = "{:<8} {:<9} {:<8} {:<26} {:>9} {:>7} {:>6} {:>6}"
    heading = ("arch", "engine", "product", "epilogue or kernel", "registers", "shared")
    click.echo(layout.format(*heading, "stack", "local"))
    for kernel in sorted(kernels(library)):
        click.echo(layout.format(*kernel))
    click.echo("# tile kernels add dynamic shared memory: hopper 204 KiB, portable 72 KiB")


if __name__ == "__main__":
    main()

"""What each CUDA kernel takes: registers, shared memory, local memory, by architecture, and how
many blocks of it a multiprocessor holds.

    python -m bench.cuda_report [--library fastsim/_lib/cuda.so]

reads the built library with cuobjdump, so no GPU has to be there. Architectures that it has no code
for take its PTX, which a driver compiles; here ptxas does. Local memory is where registers spill; a
kernel that another engine serves on an architecture is left out.
"""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click

from bench.multiprocessors import resident
from fastsim.backends.cuda.backend import LIBRARY

EMPTY = 8  # registers: a kernel without code has fewer
BY_PTX = ("sm_86", "sm_89", "sm_100", "sm_120")  # code for sm_80 serves the first two too
WARPS = {"hopper": 12, "portable": 8}  # of a block of tiles
DYNAMIC = {"hopper": 204 << 10, "portable": 48 << 10}  # bytes of shared memory beside the kernel's


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

    @property
    def blocks(self):
        """Of tiles, how many a multiprocessor holds at a time."""
        shared = self.shared + DYNAMIC[self.engine]
        architecture = self.architecture.rstrip("a")
        return resident(architecture, self.registers, shared, WARPS[self.engine])


@functools.cache
def tool(name):
    """The path of a tool: the toolkit's, or the one that comes with Triton; None without either."""
    if found := shutil.which(name):
        return found
    if nvcc := shutil.which("nvcc"):
        beside = Path(nvcc).resolve().parent / name
        if beside.exists():
            return str(beside)
    if spec := importlib.util.find_spec("triton"):
        path = Path(spec.origin).parent / "backends/nvidia/bin" / name
        return str(path) if path.exists() else None
    return None


def dump(*options, library=LIBRARY, folder=None):
    """What cuobjdump prints."""
    command = [tool("cuobjdump"), *options, str(Path(library).resolve())]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def kernels_by_ptx(architectures=BY_PTX, library=LIBRARY):
    """[Kernel] of the library's PTX, compiled for architectures; some minutes."""
    found = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        dump("--extract-ptx", "all", library=library, folder=folder)

        def compiled(architecture, source):
            target = source.with_suffix(f".{architecture}.cubin")
            command = [tool("ptxas"), f"-arch={architecture}", source, "-o", target]
            subprocess.run(command, check=True)
            return kernels(target, architecture)

        sources = sorted(Path(folder).glob("*.ptx"))
        pairs = [(a, source) for a in architectures for source in sources]
        for part in pool.map(lambda pair: compiled(*pair), pairs):
            found += part
    return found


def kernels(library=LIBRARY, architecture=""):
    """[Kernel] of everything in the library that has code.

    architecture: of a file that holds code for one, which does not name it.
    """
    found = []
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
    for name in ("cuobjdump", "ptxas"):
        if tool(name) is None:
            raise click.ClickException(f"no {name}; it comes with the CUDA toolkit and with Triton")
    layout = "{:<8} {:<9} {:<8} {:<26} {:>9} {:>7} {:>6} {:>6} {:>6}"
    heading = ("arch", "engine", "product", "epilogue or kernel", "registers", "shared")
    click.echo(layout.format(*heading, "stack", "local", "blocks"))
    for kernel in sorted(kernels(library)) + sorted(kernels_by_ptx(library=library)):
        click.echo(layout.format(*kernel, kernel.blocks if kernel.tiles else ""))
    sizes = ", ".join(f"{engine} {size >> 10} KiB" for engine, size in DYNAMIC.items())
    click.echo(f"# tile kernels add dynamic shared memory: {sizes}")


if __name__ == "__main__":
    main()

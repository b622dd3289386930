"""The registers and memory of each CUDA kernel, and the blocks that a multiprocessor holds.

    python -m bench.cuda_report [--library fastsim/_lib/cuda.so]

reads the built library with cuobjdump, and needs no GPU. For architectures without code in the
library ptxas compiles its PTX, as a driver would. Registers spill to local memory. A kernel is left
out on an architecture where another engine takes its place.
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

EMPTY = 8  # a kernel without code has fewer registers
BY_PTX = ("sm_86", "sm_89", "sm_100", "sm_120")  # code for sm_80 serves the first two too
WARPS = {"hopper": 12, "portable": 8}  # of a block that computes tiles
DYNAMIC = {"hopper": 204 << 10, "portable": 48 << 10}  # bytes of dynamic shared memory of a block


class Kernel(NamedTuple):
    """One kernel on one architecture; shared, stack and local memory in bytes."""

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
        """Whether the kernel computes tiles."""
        return self.engine in ("hopper", "portable")

    @property
    def blocks(self):
        """The number of blocks that a multiprocessor holds at a time, for a kernel of tiles."""
        shared = self.shared + DYNAMIC[self.engine]
        architecture = self.architecture.rstrip("a")
        return resident(architecture, self.registers, shared, WARPS[self.engine])


@functools.cache
def tool(name):
    """The path of a tool of the CUDA toolkit or of Triton, or None."""
    if path := shutil.which(name):
        return path
    if nvcc := shutil.which("nvcc"):
        path = Path(nvcc).resolve().parent / name
        if path.exists():
            return str(path)
    if spec := importlib.util.find_spec("triton"):
        path = Path(spec.origin).parent / "backends/nvidia/bin" / name
        return str(path) if path.exists() else None
    return None


def dump(*options, library=LIBRARY, folder=None):
    """The output of cuobjdump."""
    command = [tool("cuobjdump"), *options, str(Path(library).resolve())]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def kernels_by_ptx(architectures=BY_PTX, library=LIBRARY):
    """[Kernel] of the library's PTX, compiled for these architectures; takes some minutes."""
    result = []
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
            result += part
    return result


def kernels(library=LIBRARY, architecture=""):
    """[Kernel] of all code in the library.

    architecture: that of a file with code for a single one, which the file does not name.
    """
    result = []
    lines = dump("--dump-resource-usage", library=library).splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := re.match(r"arch = (\S+)", line):
            architecture = match[1]
        if match := re.match(r"\s*Function (\S+):", line):
            numbers = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", following))
            resources = [int(numbers[key]) for key in ("REG", "SHARED", "STACK", "LOCAL")]
            if resources[0] >= EMPTY:
                result.append(Kernel(architecture, *_names(match[1]), *resources))
    return result


def _names(symbol):
    """(engine, product, epilogue) of a mangled name, where each identifier follows its length."""
    words, end = [], 0
    while match := re.compile(r"\d+").search(symbol, end):
        end = match.end() + int(match[0])
        words.append(symbol[match.end() : end])
    if "hopper_tiles" in words:
        return "hopper", "Half", words[words.index("hopper_tiles") + 1]
    if "portable_tiles" in words:
        product, epilogue = words[words.index("portable_tiles") + 2 :][:2]
        return "portable", product, epilogue
    return "", "", next((word for word in words if word.endswith("_kernel")), symbol)


@click.command()
@click.option("--library", default=LIBRARY, type=click.Path(path_type=Path))
def main(library):
    """Print the table of all kernels."""
    if not library.exists():
        raise click.ClickException(f"{library} does not exist; FASTSIM_BUILD=cuda builds it")
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

"""Builds of the emulator by g++: the operators' library, and the suite that mutants run.

The toolkit's headers are nvcc's; nothing is compiled by nvcc itself.
"""

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

ROOT = Path(__file__).parents[4]
HERE = Path(__file__).parent
KERNELS = ROOT / "csrc/cuda"
MUTABLE = ("hopper.cuh", "portable.cuh", "tile.cuh", "epilogues.cuh")

# Why nothing here can be built, or None.
MISSING = next((f"no {tool}" for tool in ("nvcc", "g++") if shutil.which(tool) is None), None)


def flags():
    done = subprocess.run(["nvcc", "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    top = next(line.split("=", 1)[1] for line in done.stderr.splitlines() if " TOP=" in line)
    return f"""-std=c++20 -march=native -fPIC -w -DFASTSIM_EMULATED
        -DTORCH_TARGET_VERSION=0x020a000000000000 -I{ROOT}/csrc -I{KERNELS} -I{HERE}
        -I{top.strip()}/include -isystem {Path(torch.__file__).parent}/include""".split()


def compile_(*arguments):
    subprocess.run(["g++", *map(str, arguments)], check=True)


def compile_all(sources, folder, *options):
    """Object files, as many at once as there are cores."""
    targets = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = zip(sources, targets, strict=True)
        list(pool.map(lambda pair: compile_(*options, "-c", pair[0], "-o", pair[1]), pairs))
    return targets


def once(parent, name, build):
    """The folder that build(folder) fills, in `parent`; one process builds, for this content."""
    files = [*HERE.glob("*.*"), *KERNELS.glob("*"), *(ROOT / "csrc").glob("*.h")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()
    folder = parent / f"{name}-{digest[:16]}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            build(folder)
            (folder / "done").touch()
    return folder


MACHINE = ("machine", "instructions")


def machine(parent):
    """The objects of the emulator itself, which the library and all suites have in common."""

    def compiled(folder):
        compile_all([HERE / f"{name}.cpp" for name in MACHINE], folder, "-O2", *flags())

    folder = once(parent, "machine", compiled)
    return [folder / f"{name}.o" for name in MACHINE]


def library(folder):
    """emulated.so: the operators with their kernels emulated, for CPU tensors."""
    objects = machine(folder.parent)
    objects += compile_all([HERE / "kernels.cpp", KERNELS / "ops.cpp"], folder, "-O2", *flags())
    link = [f"-L{Path(torch.__file__).parent}/lib", "-ltorch_cpu", "-lc10"]
    compile_("-shared", *objects, "-o", folder / "emulated.so", *link)


def suite_parts(folder):
    """What all suites have in common beside the machine: a header compiled in advance."""
    for name in ("emulated.h", "machine.h", "suite.cpp"):
        shutil.copy(HERE / name, folder)
    header = folder / "emulated.h"
    compile_("-Og", *flags(), "-x", "c++-header", header, "-o", f"{header}.gch")


def texts():
    """{file: text} of the kernels that mutants change."""
    return {name: (KERNELS / name).read_text() for name in MUTABLE}


def suite(parts, folder, engine, part, change=lambda name, text: text):
    """A part of the suite of an engine; change(file, text): the text to compile in its place."""
    folder.mkdir(exist_ok=True)
    for name, text in texts().items():
        (folder / name).write_text(change(name, text))
    program = folder / f"{engine}{part}"
    objects = machine(parts.parent)
    kernels = [f"-I{folder}", f"-I{parts}", f"-DSUITE_{engine.upper()}", f"-DSUITE_PART={part}"]
    compile_("-Og", *kernels, *flags(), parts / "suite.cpp", *objects, "-o", program)
    return program

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


def library(folder):
    """emulated.so: the operators with their kernels emulated, for CPU tensors."""
    sources = [HERE / "kernels.cpp", HERE / "machine.cpp", HERE / "instructions.cpp"]
    objects = compile_all([*sources, KERNELS / "ops.cpp"], folder, "-O2", *flags())
    link = [f"-L{Path(torch.__file__).parent}/lib", "-ltorch_cpu", "-lc10"]
    compile_("-shared", *objects, "-o", folder / "emulated.so", *link)


def suite_parts(folder):
    """What all suites have in common: objects, and a header compiled in advance."""
    for name in ("emulated.h", "machine.h", "suite.cpp"):
        shutil.copy(HERE / name, folder)
    compile_all([HERE / "machine.cpp", HERE / "instructions.cpp"], folder, "-O2", *flags())
    header = folder / "emulated.h"
    compile_("-Og", *flags(), "-x", "c++-header", header, "-o", f"{header}.gch")


def suite(parts, folder, engine, part, mutant=None):
    """A part of the suite of an engine, with the kernels changed by a mutant."""
    folder.mkdir(exist_ok=True)
    for name in MUTABLE:
        text = (KERNELS / name).read_text()
        changed = mutant.apply(text) if mutant and mutant.file == name else text
        (folder / name).write_text(changed)
    program = folder / f"{engine}{part}"
    objects = [parts / "machine.o", parts / "instructions.o"]
    kernels = [f"-I{folder}", f"-I{parts}", f"-DSUITE_{engine.upper()}", f"-DSUITE_PART={part}"]
    compile_("-Og", *kernels, *flags(), parts / "suite.cpp", *objects, "-o", program)
    return program

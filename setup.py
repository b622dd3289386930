"""Builds the optional native libraries into fastsim/_lib by plain compiler calls.

FASTSIM_BUILD=auto | none | a comma list of library names. Under auto a library is built where there
is a compiler for it, and for CUDA a GPU too; else it is left out, with a word. A library that was
named and cannot be built fails the build.
FASTSIM_CUDA_ARCHS=80,90a: the architectures of the CUDA library; those without a letter are kept
as PTX too, for later GPUs.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# No -ffast-math: a NaN has to reach the loss. Reductions say in the code what may be reordered.
FLAGS = """-std=c++20 -O3 -fPIC -fvisibility=hidden -fopenmp-simd -fno-math-errno
    -fno-trapping-math -ffp-contract=fast -Wall -Wextra -DTORCH_TARGET_VERSION=0x020a000000000000"""
CUDA_FLAGS = "-std=c++20 -O3 -Xcompiler=-fPIC,-fvisibility=hidden -ftz=true -prec-div=false"
CUDA_ARCHS = "80,90a"
# cudaGetDriverEntryPointByVersion, which device.cu calls, is new in CUDA 12.5. C++20, tensor maps
# and the instructions of sm_90a need 12.0.
OLDEST_NVCC = (12, 5)
# The kernels are compiled once for each; csrc/cpu/choose.cpp takes one when it is first used.
INSTRUCTION_SETS = {"neon" if platform.machine() in ("aarch64", "arm64") else "generic": ""}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS["avx2"] = "-mavx2 -mfma -mf16c"
    INSTRUCTION_SETS["avx512"] = """-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c
        -mprefer-vector-width=512"""
# The products on a matrix unit, and the same over an emulation of its instructions for tests.
# No function passes the emulation's vectors on to another file, so their ABI is of no account.
AMX = {"amx_emulated": "-DFASTSIM_AMX_EMULATED -Wno-psabi"}
if "avx512" in INSTRUCTION_SETS:
    AMX["avx512_bf16"] = f"{INSTRUCTION_SETS['avx512']} -mavx512bf16 -DFASTSIM_AMX_DOTS"
    AMX["amx"] = f"{INSTRUCTION_SETS['avx512']} -mavx512bf16 -mamx-tile -mamx-bf16"
CPU_STEMS = """amx_loss amx_ops batch_totals choose cosent counts further max_sim
    max_sim_backward memory mirrored one_call ops prefix_rows rows sweep triplet"""


def compile_all(units, scratch):
    """Object files of [(compiler command, source under csrc)], as many at once as cores."""

    def build(unit, target):
        subprocess.run([*unit[0], "-c", ROOT / "csrc" / unit[1], "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build, units, [f"{scratch}/{i}.o" for i in range(len(units))]))


def compiler_of(variable, programs, wanting):
    """The words of a compiler's command: those of a variable, `ccache g++`, or a program found."""
    if command := os.environ.get(variable):
        return shlex.split(command)
    for found in filter(None, map(shutil.which, programs)):
        return [found]
    raise RuntimeError(wanting)


def torch_flags():
    """(the host compiler, what it needs for every source, what links torch)."""
    import torch  # only a build needs it here

    wanting = "no C++ compiler found; set CXX or install g++"
    compiler = compiler_of("CXX", ("g++", "clang++"), wanting)
    root = Path(torch.__file__).parent
    flags = [*FLAGS.split(), f"-I{ROOT}/csrc", "-isystem", f"{root}/include"]
    return compiler, flags, [f"-L{root}/lib", "-ltorch_cpu", "-lc10"]


def build_cpu(target, scratch):
    compiler, flags, link = torch_flags()
    command = [*compiler, *flags]
    units = [
        ([*command, f"-DFASTSIM_ISA={name}", *more.split()], f"cpu/{source}.cpp")
        for source, sets in (("kernels", INSTRUCTION_SETS), ("amx", AMX))
        for name, more in sets.items()
    ]
    units += [(command, f"cpu/{stem}.cpp") for stem in CPU_STEMS.split()]
    objects = compile_all(units, scratch)
    subprocess.run([*compiler, "-shared", *objects, "-o", target, *link], check=True)


def check_nvcc(nvcc):
    """RuntimeError for an nvcc that is too old for the sources."""
    done = subprocess.run([*nvcc, "--version"], check=True, capture_output=True, text=True)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if found is None or tuple(map(int, found.groups())) < OLDEST_NVCC:
        oldest = ".".join(map(str, OLDEST_NVCC))
        got = "an unknown version" if found is None else ".".join(found.groups())
        raise RuntimeError(f"nvcc: wanted {oldest} or later, got {got}")


def build_cuda(target, scratch):
    compiler, flags, link = torch_flags()
    wanting = "no nvcc found; set NVCC or install the CUDA toolkit"
    nvcc = compiler_of("NVCC", ("nvcc",), wanting)
    check_nvcc(nvcc)
    archs = os.environ.get("FASTSIM_CUDA_ARCHS", CUDA_ARCHS).split(",")
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    code += [f"-gencode=arch=compute_{a},code=compute_{a}" for a in archs if a.isdigit()]
    code += ["-DFASTSIM_HOPPER"] if "90a" in archs else []
    host = compiler[-1]  # nvcc runs a program, without what caches its output
    device = [*nvcc, *CUDA_FLAGS.split(), f"-I{ROOT}/csrc", "-ccbin", host, *code]
    # The slow ones first.
    stems = ("levels", "softmax", "sigmoid", "closest", "scan", "rows", "device")
    units = [(device, f"cuda/{stem}.cu") for stem in stems]
    units.append(([*compiler, *flags], "cuda/ops.cpp"))
    objects = compile_all(units, scratch)
    subprocess.run([*nvcc, "-shared", "-cudart=static", *objects, "-o", target, *link], check=True)


BUILDERS = {"cpu": build_cpu, "cuda": build_cuda}


def check_for_a_gpu():
    """The CUDA library takes a minute to build, and serves no machine without a GPU."""
    import torch  # only a build needs it here

    if not torch.cuda.is_available():
        raise RuntimeError("no GPU is here; FASTSIM_BUILD=cpu,cuda builds it for another machine")


def build_once(name, folder):
    """Builds a library unless the one in the folder is of the same sources and settings."""
    library, stamp = folder / f"{name}.so", folder / f"{name}.stamp"
    now = fingerprint()
    if library.exists() and stamp.exists() and stamp.read_text() == now:
        print(f"fastsim: {name} is up to date")
        return
    stamp.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            BUILDERS[name](library, scratch)
    except BaseException:
        library.unlink(missing_ok=True)  # one of other sources, which might still be loaded
        raise
    stamp.write_text(now)


def fingerprint():
    """A digest of everything that a library is built from."""
    import torch  # only a build needs it here

    digest = hashlib.sha256(torch.__version__.encode())
    for path in (ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))):
        digest.update(path.read_bytes() if path.is_file() else b"")
    for name in ("CXX", "NVCC", "FASTSIM_CUDA_ARCHS"):
        digest.update(os.environ.get(name, "").encode())
    return digest.hexdigest()


class Build(build_py):
    def get_source_files(self):
        """The sources of the libraries belong to a source distribution."""
        found = sorted(p for p in (ROOT / "csrc").rglob("*") if p.is_file())
        return [*super().get_source_files(), *(str(p.relative_to(ROOT)) for p in found)]

    def run(self):
        super().run()
        if not (ROOT / "csrc").is_dir():
            # Without a compiler the package works on plain torch; without sources it is broken.
            raise SystemExit(f"csrc: wanted the sources of the native libraries in {ROOT}")
        folder = (ROOT if self.editable_mode else Path(self.build_lib)) / "fastsim/_lib"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = os.environ.get("FASTSIM_BUILD", "auto").split(",")
        if unknown := set(wanted) - {"auto", "none", *BUILDERS}:
            raise SystemExit(f"FASTSIM_BUILD: wanted auto, none or {[*BUILDERS]}, got {unknown}")
        for name in (name for name in BUILDERS if name in wanted or "auto" in wanted):
            try:
                if name == "cuda" and name not in wanted:
                    check_for_a_gpu()
                build_once(name, folder)
            except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
                if name in wanted:
                    raise SystemExit(f"FASTSIM_BUILD={name}: {error}") from error
                print(f"fastsim: leaving out {name}: {error}")


class Wheel(bdist_wheel):
    def get_tag(self):
        """One wheel per platform: the libraries use torch's stable ABI and nothing of Python's."""
        return "py3", "none", super().get_tag()[2]


class Native(Distribution):
    def has_ext_modules(self):  # the wheel belongs to one platform
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Native)

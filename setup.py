"""Builds the optional native libraries into fastsim/_lib by plain compiler calls.

FASTSIM_BUILD=auto (whatever a compiler is there for) | none | a comma list of library names. A
library that was named and cannot be built fails the build; under auto it is left out, with a word.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# No -ffast-math: a NaN has to reach the loss. Reductions say in the code what may be reordered.
FLAGS = """-std=c++20 -O3 -fPIC -fvisibility=hidden -fopenmp-simd -fno-math-errno
    -fno-trapping-math -ffp-contract=fast -Wall -Wextra -DTORCH_TARGET_VERSION=0x020a000000000000"""
# The kernels are compiled once for each; csrc/cpu/ops.cpp chooses when the library is loaded.
INSTRUCTION_SETS = {"generic": ""}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS["avx2"] = "-mavx2 -mfma -mf16c"
    INSTRUCTION_SETS["avx512"] = """-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c
        -mprefer-vector-width=512"""


def build_cpu(target, scratch):
    import torch  # only a build needs it here

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler found; set CXX or install g++")
    torch_root = Path(torch.__file__).parent
    flags = [*FLAGS.split(), f"-I{ROOT}/csrc", "-isystem", f"{torch_root}/include"]
    units = [("kernels", f"-DFASTSIM_ISA={k} {v}") for k, v in INSTRUCTION_SETS.items()]
    objects = []
    for stem, extra in [*units, ("choose", ""), ("ops", ""), ("ranking", ""), ("whole", "")]:
        objects.append(f"{scratch}/{len(objects)}.o")
        source = ROOT / f"csrc/cpu/{stem}.cpp"
        subprocess.run(
            [compiler, *flags, *extra.split(), "-c", source, "-o", objects[-1]], check=True
        )
    link = [f"-L{torch_root}/lib", "-ltorch_cpu", "-lc10"]
    subprocess.run([compiler, "-shared", *objects, "-o", target, *link], check=True)


BUILDERS = {"cpu": build_cpu}


class Build(build_py):
    def run(self):
        super().run()
        folder = (ROOT if self.editable_mode else Path(self.build_lib)) / "fastsim/_lib"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = os.environ.get("FASTSIM_BUILD", "auto").split(",")
        if unknown := set(wanted) - {"auto", "none", *BUILDERS}:
            raise SystemExit(f"FASTSIM_BUILD: wanted auto, none or {[*BUILDERS]}, got {unknown}")
        for name in (name for name in BUILDERS if name in wanted or "auto" in wanted):
            try:
                with tempfile.TemporaryDirectory() as scratch:
                    BUILDERS[name](folder / f"{name}.so", scratch)
            except (ImportError, RuntimeError, subprocess.CalledProcessError) as error:
                if name in wanted:
                    raise SystemExit(f"FASTSIM_BUILD={name}: {error}") from error
                print(f"fastsim: leaving out {name}: {error}")


class Native(Distribution):
    def has_ext_modules(self):  # the wheel belongs to one platform
        return True


setup(cmdclass={"build_py": Build}, distclass=Native)

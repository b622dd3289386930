"""What a user installs: the source distribution, the wheel made of it, and what it serves."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("csrc", "fastsim", "setup.py", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler"
)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, so that nothing is built beside them."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("_lib", "__pycache__", "*.egg-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


@pytest.fixture(scope="module")
def sdist(tree):
    code, said = run(sys.executable, "setup.py", "-q", "sdist", cwd=tree)
    assert code == 0, said
    (archive,) = (tree / "dist").glob("*.tar.gz")
    return archive


def test_an_sdist_carries_every_source(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    assert len(sources) > 20
    missing = {str(p.relative_to(ROOT)) for p in sources} - names
    assert not missing
    assert {"setup.py", "fastsim/py.typed", "fastsim/training/demo_sentences.tsv"} <= names


def test_a_wheel_from_the_sdist_serves_the_cpu(sdist, tmp_path):
    """One wheel for every Python of the platform, with the library in it."""
    compiler = tmp_path / "compiler"  # it need not make the library fast, only make it
    compiler.write_text(
        f'#!/bin/sh\nexec {shutil.which("g++") or shutil.which("clang++")} "$@" -O0\n'
    )
    compiler.chmod(0o755)
    command = ["-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path, sdist]
    quickly = {"FASTSIM_BUILD": "cpu", "CXX": str(compiler)}
    code, said = run(sys.executable, *command, env=os.environ | quickly)
    assert code == 0, said[-4000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("fastsim_losses-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    site = tmp_path / "site"
    code, said = run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel)
    )
    assert code == 0, said[-4000:]
    environment = os.environ | {"PYTHONPATH": str(site)}
    code, said = run(sys.executable, "-m", "fastsim", "info", cwd=tmp_path, env=environment)
    assert code == 0, said
    (line,) = (line for line in said.splitlines() if line.split()[:1] == ["cpu"])
    assert "usable" in line, said


def test_missing_sources_are_an_error(tree, tmp_path):
    """Not a package that silently has no kernels."""
    bare = shutil.copytree(tree, tmp_path / "bare", ignore=shutil.ignore_patterns("csrc", "dist"))
    code, said = run(sys.executable, "setup.py", "-q", "build_py", cwd=bare)
    assert code != 0
    assert "csrc: wanted the sources" in said


def built(tree, folder, **variables):
    """(exit status, what is said, the folder of libraries) of a build by these variables."""
    variables = {"FASTSIM_BUILD": "auto"} | variables
    command = sys.executable, "setup.py", "build_py", "--build-lib", folder
    code, said = run(*command, cwd=tree, env=os.environ | variables)
    return code, said, folder / "fastsim/_lib"


def test_a_compiler_that_is_not_there(tree, tmp_path):
    """A sentence where nobody asked for the library by name."""
    wanting = {"CXX": str(tmp_path / "missing"), "NVCC": str(tmp_path / "none")}
    code, said, libraries = built(tree, tmp_path / "build", **wanting)
    assert code == 0, said
    assert "fastsim: leaving out cpu: [Errno 2]" in said
    assert not [*libraries.glob("*.so")]
    code, said, _ = built(tree, tmp_path / "build", FASTSIM_BUILD="cpu", **wanting)
    assert code != 0
    assert "FASTSIM_BUILD=cpu: [Errno 2]" in said


@pytest.mark.parametrize(
    ("release", "got"),
    [("release 12.4, V12.4.131", "12.4"), ("release 9.10, V9.10.1", "9.10"), ("", "an unknown")],
)
def test_an_nvcc_that_is_too_old(release, got, tree, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, {release}"\n')
    nvcc.chmod(0o755)
    code, said, libraries = built(tree, tmp_path / "build", FASTSIM_BUILD="cuda", NVCC=str(nvcc))
    assert code != 0
    assert f"FASTSIM_BUILD=cuda: nvcc: wanted 12.5 or later, got {got}" in said
    assert not [*libraries.glob("*.so")]


@pytest.fixture
def wrapper(tmp_path):
    """A compiler that makes what is named after -o, of what it was told."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        '#!/bin/sh\nfirst=$1\nwhile [ "$1" != -o ]; do shift; done\necho "$first" > "$2"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


def test_a_compiler_of_several_words(tree, tmp_path, wrapper):
    """Of `ccache g++` all are run."""
    compiler = {"FASTSIM_BUILD": "cpu", "CXX": f"{wrapper} compiler"}
    code, said, libraries = built(tree, tmp_path / "build", **compiler)
    assert code == 0, said
    assert (libraries / "cpu.so").read_text() == "compiler\n"


def test_a_library_that_is_left_out_is_not_an_earlier_one(tree, tmp_path, wrapper):
    """One of other sources would be loaded as if it were of these."""
    folder, no_nvcc = tmp_path / "build", {"NVCC": str(tmp_path / "none")}
    code, said, libraries = built(tree, folder, CXX=f"{wrapper} compiler", **no_nvcc)
    assert code == 0, said
    assert [path.name for path in libraries.glob("*.so")] == ["cpu.so"]
    code, said, _ = built(tree, folder, CXX=str(shutil.which("false")), **no_nvcc)
    assert code == 0, said
    assert "fastsim: leaving out cpu" in said
    assert not [*libraries.iterdir()]

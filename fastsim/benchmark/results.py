"""Result files: JSON lines. The first says on what the rest was measured, every other is a figure.

Rows that are no figure have "not measured", a sentence, in its place.
"""

import json
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from fastsim.backends import get
from fastsim.backends.cpu import amx
from fastsim.files import OutputError, check_new_file, write_whole

CPUINFO = Path("/proc/cpuinfo")
PACKAGES = (
    *("torch", "fastsim", "triton", "sentence-transformers", "open_clip_torch"),
    *("pytorch-metric-learning", "siglip-kernel", "memeff", "inf-cl", "cut-cross-entropy"),
    *("transformers", "accelerate"),
)


def device_name(device="cpu"):
    """The processor, with its threads and instructions, or the GPU that figures belong to, as a
    folder's name. One model of a processor comes with and without a matrix unit.
    """
    if device == "cuda":
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    words = f"{_processor(CPUINFO)}-x{torch.get_num_threads()}-{instructions()}"
    return words.replace(" ", "-")


def _processor(cpuinfo):
    """The processor's name in small letters, of an AMD processor with its generation, which the
    name that a virtual machine gives leaves out; cpuinfo: what Linux says of it, a file.
    """
    said = {}
    if cpuinfo.exists():  # elsewhere than on Linux there is none
        first = cpuinfo.read_text().partition("\n\n")[0].splitlines()
        said = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in first)}
    name = said.get("model name") or platform.processor() or platform.machine()
    words = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b", " ", name.lower()).split()
    if said.get("vendor_id") == "AuthenticAMD":
        has_avx512 = "avx512f" in said["flags"].split()
        families = {"25": "zen4" if has_avx512 else "zen3", "26": "zen5"}
        words += filter(None, [families.get(said["cpu family"])])
    return " ".join(words)


def instructions():
    """The instructions in use: those of a matrix unit, of the kernels, or of torch's own."""
    if get("cpu").unsupported_reason():  # no kernels
        return torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    unit = amx.name() if amx.is_matrix_unit() else ""
    return unit or torch.ops.fastsim_cpu.instruction_set()


def environment(device="cpu", settings=None):
    """Device, versions, commit, settings: the first line of a result file."""
    return {
        "device": device_name(device),
        "kind": device,
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "commit": commit(),
        # Above the number of cores, times are not those of the code.
        "load average": round(os.getloadavg()[0], 2),
        "settings": settings or {},
    }


def _versions():
    for package in PACKAGES:
        try:
            found = metadata.version(package)
            # Its own name says which build it is, which the distribution's may leave out.
            yield package, str(torch.__version__) if package == "torch" else found
        except metadata.PackageNotFoundError:
            continue


def commit():
    """The commit of the code that runs, "" for an installed package."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def write(path, about, rows):
    """One result file of the environment `about` and the rows (dicts), whole or not at all."""
    path = Path(path)
    _make_folder("path", path.parent)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in (about, *rows)))


def check_new(name, path):
    """`OutputError` where `write` could write nothing: found out before anything is measured.

    name: of the argument.
    """
    _make_folder(name, Path(path).parent)
    check_new_file(name, path)


def _make_folder(name, folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot make the folder {str(folder)!r}: {error.strerror}"
        raise OutputError(f"{name}: {why}") from error


def read(path):
    """(environment, rows) of a result file. ValueError for one that is none."""
    try:
        about, *rows = map(json.loads, Path(path).read_text().splitlines())
        if all(isinstance(line, dict) for line in (about, *rows)) and "settings" in about:
            return about, rows
    except ValueError:  # no text, no line or no JSON
        pass
    raise ValueError(f"{path}: wanted a result file of `fastsim bench`")

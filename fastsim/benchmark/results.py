"""Result files in JSON lines: the environment of a run, then one row for each figure.

A row without a figure has a sentence under "not measured" in its place.
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
    """The name of the GPU, or of the processor with its threads and instructions, for a folder.

    The instructions are part of it because one model of a processor comes with and without a matrix
    unit.
    """
    if device == "cuda":
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    words = f"{_processor(CPUINFO)}-x{torch.get_num_threads()}-{instructions()}"
    return words.replace(" ", "-")


def _described(cpuinfo):
    """What Linux says of the first processor, by field; {} on other systems."""
    if not cpuinfo.exists():
        return {}
    lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    parts = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in parts}


def _processor(cpuinfo):
    """The name of the processor in lower case; for AMD also its generation.

    Virtual machines give an AMD processor a name without the generation. cpuinfo: the file in which
    Linux describes the processor.
    """
    fields = _described(cpuinfo)
    name = fields.get("model name") or platform.processor() or platform.machine()
    words = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b", " ", name.lower()).split()
    if fields.get("vendor_id") == "AuthenticAMD":
        has_avx512 = "avx512f" in fields["flags"].split()
        families = {"25": "zen4" if has_avx512 else "zen3", "26": "zen5"}
        words += filter(None, [families.get(fields["cpu family"])])
    return " ".join(words)


def _model(cpuinfo):
    """Numbers that tell processors of the same name apart; {} where Linux does not give them."""
    fields = _described(cpuinfo)
    return {key: fields[key] for key in ("cpu family", "model", "cache size") if key in fields}


def instructions():
    """The instructions in use: those of a matrix unit, else of the kernels, else of torch."""
    if get("cpu").unsupported_reason():  # there are no kernels
        return torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    unit = amx.name() if amx.is_matrix_unit() else ""
    return unit or torch.ops.fastsim_cpu.instruction_set()


def environment(device="cpu", settings=None):
    """The first line of a result file: the device, versions, commit and settings of a run."""
    return {
        "device": device_name(device),
        "kind": device,
        "processor": _model(CPUINFO),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "commit": commit(),
        # If it exceeds the number of cores, other programs have slowed the code down.
        "load average": round(os.getloadavg()[0], 2),
        "settings": settings or {},
    }


def _versions():
    for package in PACKAGES:
        try:
            version = metadata.version(package)
            # torch itself names its build, which the metadata of the distribution may leave out.
            yield package, str(torch.__version__) if package == "torch" else version
        except metadata.PackageNotFoundError:
            continue


def commit():
    """The commit of the running code; "" for an installed package."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


def write(path, about, rows):
    """Write a result file, whole or not at all: the environment `about`, then the rows (dicts)."""
    path = Path(path)
    _make_folder("path", path.parent)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in (about, *rows)))


def check_new(name, path):
    """`OutputError` if `write` would fail; called before anything is measured.

    name: the name of the argument, for the message.
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
    """(environment, rows) of a result file; ValueError if the file is not one."""
    try:
        about, *rows = map(json.loads, Path(path).read_text().splitlines())
        if all(isinstance(line, dict) for line in (about, *rows)) and "settings" in about:
            return about, rows
    except ValueError:  # not text, empty or not JSON
        pass
    raise ValueError(f"{path}: wanted a result file of `fastsim bench`")

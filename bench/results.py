"""Result files: JSON lines with the device, versions and commit beside every figure."""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "results"


def device_name():
    """The processor (or accelerator) that the figures belong to, as a folder name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].split(":")[1].strip() if models else name
    return f"{name} x{torch.get_num_threads()}".lower().replace(" ", "-")


def environment():
    """Versions and commit."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "fastsim", "sentence-transformers", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER.parent,
    ).stdout.strip()
    return {"device": device_name(), "versions": versions, "commit": commit}


def write(name, rows):
    """Writes rows (dicts) to bench/results/<device>/<name>.jsonl and returns the path."""
    common = environment()
    path = FOLDER / common["device"] / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(common | row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(name, device):
    """The rows of a result file."""
    text = (FOLDER / device / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]

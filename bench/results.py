"""Where this repository keeps its results: bench/results/<device>/<name>.jsonl."""

from pathlib import Path

import torch

from fastsim.benchmark import results

FOLDER = Path(__file__).parent / "results"


def write(name, rows, *, device=None, settings=None):
    """One result file of what was measured on `device`: by default the GPU where there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    about = results.environment(device, settings)
    path = FOLDER / about["device"] / f"{name}.jsonl"
    results.write(path, about, rows)
    return path


def read(name, folder):
    """(environment, rows) of a result file in a device's folder; None where there is none."""
    path = FOLDER / folder / f"{name}.jsonl"
    return results.read(path) if path.is_file() else None


def folders(kind):
    """Folders of the devices of a kind, "cpu" or "cuda", that the losses were measured on."""
    found = {path.parent.name: results.read(path)[0] for path in FOLDER.glob("*/losses.jsonl")}
    return sorted(name for name, about in found.items() if about["kind"] == kind)

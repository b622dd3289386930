"""Where this repository keeps its results: bench/results/<device>/<name>.jsonl."""

from pathlib import Path

import torch

from fastsim.benchmark import results

FOLDER = Path(__file__).parent / "results"


def write(name, rows, about=None):
    """One result file; `about` as it was when the run began, else as it is now.

    Without it the device is the GPU where there is one.
    """
    about = about or results.environment("cuda" if torch.cuda.is_available() else "cpu")
    path = FOLDER / about["device"] / f"{name}.jsonl"
    results.write(path, about, rows)
    return path


def read(name, folder):
    """(environment, rows) of a result file in a device's folder; None where there is none."""
    path = FOLDER / folder / f"{name}.jsonl"
    return results.read(path) if path.is_file() else None


def read_losses(folder):
    """(environment, rows) of a device's run of the losses, None where there is none.

    The environment is that of the first of its parts.
    """
    about, rows = None, []
    for path in parts(folder):
        other, more = results.read(path)
        about = about or other
        if other["device"] != about["device"]:
            raise ValueError(f"{path}: wanted a run of {about['device']}, got {other['device']}")
        rows = rows + more
    return about and (about, rows)


def parts(folder):
    """The files of a device's run of the losses: losses.jsonl, losses_PART.jsonl, or both.

    A long run may be made in parts, each of other losses, sizes or measures.
    """
    return sorted((FOLDER / folder).glob("losses*.jsonl"))


def folders(kind, name="losses*"):
    """Folders of the devices of a kind, "cpu" or "cuda", that have results of that name."""
    found = {path.parent.name: results.read(path)[0] for path in FOLDER.glob(f"*/{name}.jsonl")}
    return sorted(name for name, about in found.items() if about["kind"] == kind)

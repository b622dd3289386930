"""The result files of this repository: bench/results/<device>/<name>.jsonl."""

from pathlib import Path

import torch

from fastsim.benchmark import results

FOLDER = Path(__file__).parent / "results"


def write(name, rows, about=None):
    """Write a result file; returns its path.

    about: the environment when the run began. None: the present one, of the GPU if there is one.
    """
    about = about or results.environment("cuda" if torch.cuda.is_available() else "cpu")
    path = FOLDER / about["device"] / f"{name}.jsonl"
    results.write(path, about, rows)
    return path


def read(name, folder):
    """(environment, rows) of a result file in a device's folder, or None without the file."""
    path = FOLDER / folder / f"{name}.jsonl"
    return results.read(path) if path.is_file() else None


def read_losses(folder):
    """(environment, rows) of a device's run of the losses, or None without one.

    The environment is that of the first part of the run.
    """
    about, rows = None, []
    for path in parts(folder):
        environment, part_rows = results.read(path)
        about = about or environment
        if environment["device"] != about["device"]:
            wanted, got = about["device"], environment["device"]
            raise ValueError(f"{path}: wanted a run of {wanted}, got {got}")
        rows = rows + part_rows
    return about and (about, rows)


def parts(folder):
    """The files of a device's run of the losses: losses.jsonl, losses_PART.jsonl, or both.

    A long run may have several parts, with different losses, sizes or measures.
    """
    return sorted((FOLDER / folder).glob("losses*.jsonl"))


def folders(kind, name="losses*"):
    """The folders of all devices of a kind, "cpu" or "cuda", that have results of that name."""
    paths = FOLDER.glob(f"*/{name}.jsonl")
    environments = {path.parent.name: results.read(path)[0] for path in paths}
    return sorted(folder for folder, about in environments.items() if about["kind"] == kind)

"""Checkpoints of a run: where they are, whether they are whole, and what the run was asked."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from fastsim.training.folders import OutputError

RUN = "run.json"
MANIFEST = "fastsim_checkpoint.json"


def checkpoint_folder(output, chosen=None):
    """Where the checkpoints of a run into `output` are: the folder chosen, else beside the output.

    Where the output is a mount point, or nothing can be written beside it, they are in its folder
    `checkpoints`: what survives the machine is then the output alone.
    """
    if chosen is not None:
        return Path(os.path.abspath(chosen))
    output = Path(os.path.realpath(output))
    beside, inside = output.with_name(f"{output.name}-checkpoints"), output / "checkpoints"
    if inside.is_dir() and not beside.exists():
        return inside if (inside / RUN).is_file() else beside
    parent = next(folder for folder in output.parents if folder.exists())
    usable = os.access(parent, os.W_OK) and not _read_only(parent) and not os.path.ismount(output)
    return beside if usable else inside


def _read_only(folder):
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_RDONLY", 1))


# ---- one checkpoint ----


def seal(folder):
    """Write the manifest of a complete checkpoint: size and SHA-256 of each file."""
    folder = Path(folder)
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST]
    about = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": fingerprint(file)}
        for file in sorted(files)
    }
    write_whole(folder / MANIFEST, json.dumps(about, indent=1))


def damage(folder):
    """Why a checkpoint cannot be used, or None where every file of its manifest is as written."""
    folder = Path(folder)
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except OSError:
        return "it was cut off while it was written"
    except ValueError:
        return f"{MANIFEST} is damaged"
    for name, wanted in about.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {wanted['bytes']}"
        if fingerprint(file) != wanted["sha256"]:
            return f"{name} is not what was written"
    return None


def newest_whole(checkpoints):
    """(the newest checkpoint that is whole or None, [why a newer one is not used])."""
    found = []
    for path in Path(checkpoints).glob("checkpoint-*"):
        step = path.name.rpartition("-")[2]
        if step.isdigit() and path.is_dir():
            found.append((int(step), path))
    passed = []
    for _, path in sorted(found, reverse=True):
        reason = damage(path)
        if reason is None:
            return path, passed
        passed.append(f"{path.name} cannot be used: {reason}")
    return None, passed


def steps_of(checkpoint):
    """The step that a checkpoint was written at."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    return state["global_step"]


# ---- all of a run ----


def remove_unusable(checkpoints):
    """Remove checkpoints whose writing was cut off; others than ours are not touched."""
    for path in Path(checkpoints).glob("checkpoint-*"):
        if path.is_dir() and damage(path) is not None:
            shutil.rmtree(path)


def remove_run(checkpoints):
    """Remove what a run wrote into its folder of checkpoints, and the folder if it is empty."""
    checkpoints = Path(checkpoints)
    for path in checkpoints.glob("checkpoint-*"):
        step = path.name.rpartition("-")[2]
        if step.isdigit() and path.is_dir():
            shutil.rmtree(path)
    (checkpoints / RUN).unlink(missing_ok=True)
    if checkpoints.is_dir() and not any(checkpoints.iterdir()):
        checkpoints.rmdir()


def read_run(checkpoints):
    """What the run was asked and what was known before its first step; `OutputError` without."""
    file = Path(checkpoints) / RUN
    if not file.is_file():
        raise OutputError(
            f"resume: {str(file)!r} is missing; without it nobody knows what the run was asked."
            " --overwrite begins anew"
        )
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        state["asked"], state["before"]
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"resume: {str(file)!r} is damaged or empty; --overwrite begins anew"
        ) from error
    return state


def write_whole(path, text):
    """A text file that is there whole or not at all."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(part, path)


def fingerprint(path):
    """SHA-256 of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

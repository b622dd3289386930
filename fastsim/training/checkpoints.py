"""Checkpoints of a run: where they are, whether they are whole, and what the run was asked."""

import contextlib
import json
import os
import shutil
from pathlib import Path

from fastsim.files import OutputError, fingerprint, unused_name, write_whole
from fastsim.locks import locked

RUN = "fastsim_run.json"
MANIFEST = "fastsim_checkpoint.json"
_LOCK = "fastsim_run.lock"
_BEGUN = ".fastsim-checkpoint-"


def checkpoint_folder(output, chosen=None):
    """Where the checkpoints of a run into `output` are: the folder chosen, else beside the output.

    Where the output is a mount point, or nothing can be written beside it, they are in its folder
    `checkpoints`: what survives the machine is then the output alone.
    """
    asked, output = output, Path(os.path.realpath(output))
    if not output.name:
        raise OutputError(f"output: wanted a folder other than the root, got {str(asked)!r}")
    if chosen is not None:
        return Path(os.path.abspath(chosen))
    beside, inside = output.with_name(f"{output.name}-checkpoints"), output / "checkpoints"
    if (inside / RUN).is_file() and not beside.exists():
        return inside
    parent = next(folder for folder in output.parents if folder.exists())
    usable = os.access(parent, os.W_OK) and not _read_only(parent) and not os.path.ismount(output)
    return beside if usable else inside


def _read_only(folder):
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_RDONLY", 1))


# ---- one run at a time ----


@contextlib.contextmanager
def claimed(checkpoints, output):
    """While this lasts no other run can begin in the folder of the checkpoints or of the output.

    Two runs in one folder would resume from each other's checkpoints, choose them as best, and
    remove them; into one output they would put one model in the place of the other. `OutputError`
    where another run is there, or nothing can be written.
    """
    checkpoints, output = (Path(os.path.realpath(folder)) for folder in (checkpoints, output))
    written(checkpoints)  # nothing is put into a folder that is refused
    with contextlib.ExitStack() as locks:
        if checkpoints.is_dir() and any(checkpoints.iterdir()):  # an empty one is the user's
            locks.callback(_remove_empty, checkpoints)
        for folder, name in {checkpoints: "checkpoints", output: "output"}.items():
            refusal = (
                f"{name}: another run is writing to {str(folder)!r}; wait for its end, or choose"
                " another folder"
            )
            try:
                locks.enter_context(locked(folder, _LOCK, refusal=refusal))
            except OutputError:
                raise
            except OSError as error:
                raise OutputError(f"{name}: {str(folder)!r}: {error.strerror}") from error
        yield


def _remove_empty(folder):
    with contextlib.suppress(OSError):
        folder.rmdir()


# ---- one checkpoint ----


def begin(folder):
    """Make the folder of a checkpoint, which is never there without the mark that it is ours."""
    folder = Path(folder)
    made = folder.with_name(unused_name(_BEGUN))
    made.mkdir(parents=True)
    write_whole(made / MANIFEST, json.dumps(None))
    os.rename(made, folder)


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
    """Why a checkpoint cannot be used, or None where every file of its manifest is as written.

    `OutputError` where a file cannot be read just now: what is damaged may be removed.
    """
    try:
        return _damage(Path(folder))
    except OSError as error:
        raise OutputError(f"checkpoints: {str(folder)!r}: {error.strerror or error}") from error


def _damage(folder):
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return f"{MANIFEST} is damaged"
    if about is None:
        return "it was cut off while it was written"
    for name, wanted in about.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {wanted['bytes']}"
        if fingerprint(file) != wanted["sha256"]:
            return f"{name} is not what was written"
    return None


# ---- all of a run ----


def _step_in(name):
    """The step in the name of a checkpoint, or None."""
    step = name.removeprefix("checkpoint-")
    return int(step) if step.isascii() and step.isdigit() else None


def check_ours(path):
    """`OutputError` where a folder with the name of a checkpoint is not ours."""
    if path.is_dir() and (_step_in(path.name) is None or not (path / MANIFEST).is_file()):
        raise OutputError(
            f"checkpoints: {str(path)!r} is not a checkpoint of fastsim; move it, or choose"
            " another folder with --checkpoints"
        )


def written(checkpoints):
    """The checkpoints of a run in its folder, whole or not, the newest first.

    `OutputError` where that is a file, or a folder of such a name is not ours: a checkpoint may
    want its place.
    """
    checkpoints = Path(checkpoints)
    if checkpoints.exists() and not checkpoints.is_dir():
        raise OutputError(f"checkpoints: wanted a folder, {str(checkpoints)!r} is a file")
    for path in checkpoints.glob("checkpoint-*"):
        check_ours(path)
    return _ours(checkpoints)


def _ours(checkpoints):
    """As `written`, whatever else is there."""
    found = [(_step_in(path.name), path) for path in Path(checkpoints).glob("checkpoint-*")]
    ours = [pair for pair in found if pair[0] is not None and (pair[1] / MANIFEST).is_file()]
    return [path for _, path in sorted(ours, reverse=True)]


def newest_whole(checkpoints):
    """(the newest checkpoint that is whole or None, [why a newer one is not used])."""
    passed = []
    for path in written(checkpoints):
        reason = damage(path)
        if reason is None:
            return path, passed
        passed.append(f"{path.name} cannot be used: {reason}")
    return None, passed


def remove_unusable(checkpoints, whole):
    """Remove the checkpoints of a run that are damaged, or whose writing was cut off.

    whole: one that is known not to be, and is not read again.
    """
    for path in written(checkpoints):
        if path != whole and damage(path) is not None:
            _remove(path)


def remove_older(checkpoints, best=None):
    """Remove all checkpoints of a run but the newest and the best, or the two newest.

    transformers would remove folders of the user's too, such as a copy of a checkpoint.
    """
    older = _ours(checkpoints)[1:]
    names = [path.name for path in older]
    kept = names.index(Path(best).name) if best and Path(best).name in names else 0
    for path in older[:kept] + older[kept + 1 :]:
        _remove(path)


def _remove(path):
    """Remove a checkpoint, under another name: cut off half-way it would pass for the user's."""
    gone = path.with_name(unused_name(_BEGUN))
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_run(checkpoints):
    """Remove what a run wrote into its folder of checkpoints; `claimed` removes an empty folder."""
    checkpoints = Path(checkpoints)
    for path in (*_ours(checkpoints), *checkpoints.glob(f"{_BEGUN}*")):
        _remove(path)
    (checkpoints / RUN).unlink(missing_ok=True)


def read_run(checkpoints):
    """What the run was asked and what was known before its first step; `OutputError` without."""
    file = Path(checkpoints) / RUN
    if not file.is_file():
        raise OutputError(
            f"resume: {str(file)!r} is missing; it holds the options of the run."
            " --overwrite starts afresh"
        )
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        state["asked"], state["before"]
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"resume: {str(file)!r} is damaged or empty; --overwrite starts afresh"
        ) from error
    return state

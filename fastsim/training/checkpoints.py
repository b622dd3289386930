"""Checkpoints of a run: where they are, whether they are complete, and the options of the run."""

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
    """The folder of the checkpoints of a run into `output`: `chosen`, or one next to the output.

    If the output is a mount point, or nothing can be written next to it, the folder is
    `checkpoints` inside the output: only the output may then outlive the machine.
    """
    name, output = output, Path(os.path.realpath(output))
    if not output.name:
        raise OutputError(f"output: wanted a folder other than the root, got {str(name)!r}")
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
    """A context in which no other run can begin in these folders.

    Two runs with the same folder of checkpoints would resume from, select and remove each other's
    checkpoints. Two runs with the same output would overwrite each other's model. `OutputError` if
    another run has claimed a folder, or if nothing can be written.
    """
    checkpoints, output = (Path(os.path.realpath(folder)) for folder in (checkpoints, output))
    written(checkpoints)  # refuses the folder before a lock is put into it
    with contextlib.ExitStack() as locks:
        if _listed(checkpoints):  # the user made an empty folder, so it stays
            locks.callback(_remove_empty, checkpoints)
        for folder, name in {checkpoints: "checkpoints", output: "output"}.items():
            refusal = (
                f"{name}: another run is writing to {str(folder)!r}; wait for it to finish, or"
                " choose another folder"
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
    """Make the folder of a checkpoint together with its manifest, the mark that it is ours."""
    folder = Path(folder)
    temporary = folder.with_name(unused_name(_BEGUN))
    temporary.mkdir(parents=True)
    write_whole(temporary / MANIFEST, json.dumps(None))
    os.rename(temporary, folder)


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
    """Why a checkpoint cannot be used, or None if every file in its manifest is as it was written.

    `OutputError` if a file cannot be read at the moment, which is no damage: damaged checkpoints
    may be removed.
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
        return "it was interrupted while it was written"
    for name, expected in about.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if fingerprint(file) != expected["sha256"]:
            return f"{name} has changed since it was written"
    return None


# ---- all checkpoints of a run ----


def _listed(folder):
    """The content of a folder, empty if it does not exist: a run that ends removes its folder."""
    try:
        return list(Path(folder).iterdir())
    except FileNotFoundError:
        return []


def _step_in(name):
    """The step in the name of a checkpoint, or None."""
    start, _, step = name.partition("checkpoint-")
    return int(step) if not start and step.isascii() and step.isdigit() else None


def check_ours(path):
    """`OutputError` if a folder with the name of a checkpoint is not ours."""
    if path.is_dir() and (_step_in(path.name) is None or not (path / MANIFEST).is_file()):
        raise OutputError(
            f"checkpoints: {str(path)!r} is not a checkpoint of fastsim; move it, or choose"
            " another folder with --checkpoints"
        )


def written(checkpoints):
    """The checkpoints in the folder of a run, complete or not, the newest first.

    `OutputError` if that is a file, or if it holds a folder with the name of a checkpoint that is
    not ours, since a checkpoint of the run may need that name.
    """
    checkpoints = Path(checkpoints)
    if checkpoints.exists() and not checkpoints.is_dir():
        raise OutputError(f"checkpoints: wanted a folder, got the file {str(checkpoints)!r}")
    for path in _listed(checkpoints):
        if path.name.startswith("checkpoint-"):
            check_ours(path)
    return _ours(checkpoints)


def _ours(checkpoints):
    """As `written`, ignoring everything that is not ours."""
    folders = [(_step_in(path.name), path) for path in _listed(checkpoints)]
    ours = [pair for pair in folders if pair[0] is not None and (pair[1] / MANIFEST).is_file()]
    return [path for _, path in sorted(ours, reverse=True)]


def newest_complete(checkpoints):
    """(the newest complete checkpoint or None, [why a newer one is not used])."""
    skipped = []
    for path in written(checkpoints):
        reason = damage(path)
        if reason is None:
            return path, skipped
        skipped.append(f"{path.name} cannot be used: {reason}")
    return None, skipped


def remove_unusable(checkpoints, usable):
    """Remove the checkpoints of a run that are damaged or incomplete.

    usable: one that is known to be complete, and is not read again.
    """
    for path in written(checkpoints):
        if path != usable and damage(path) is not None:
            _remove(path)


def remove_older(checkpoints, best=None):
    """Remove all checkpoints of a run except the newest and the best, or the two newest.

    transformers would also remove folders of the user, such as a copy of a checkpoint.
    """
    older = _ours(checkpoints)[1:]
    names = [path.name for path in older]
    kept = names.index(Path(best).name) if best and Path(best).name in names else 0
    for path in older[:kept] + older[kept + 1 :]:
        _remove(path)


def remove_failed(path):
    """Remove a checkpoint that could not be written, since it takes room.

    Every process calls this. The folder may be gone, or be one that the user has made meanwhile.
    """
    if (path / MANIFEST).is_file():
        with contextlib.suppress(OSError):  # another process has removed it
            _remove(path)


def _remove(path):
    """Rename a checkpoint and remove it: half removed it would look like a folder of the user."""
    renamed = path.with_name(unused_name(_BEGUN))
    os.rename(path, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def remove_run(checkpoints):
    """Remove what a run wrote into its folder of checkpoints; `claimed` removes an empty one."""
    checkpoints = Path(checkpoints)
    for path in (*_ours(checkpoints), *checkpoints.glob(f"{_BEGUN}*")):
        _remove(path)
    (checkpoints / RUN).unlink(missing_ok=True)


def read_run(checkpoints):
    """The options of a run and the results of its untrained model; `OutputError` without them."""
    file = Path(checkpoints) / RUN
    if not file.is_file():
        raise OutputError(
            f"resume: {str(file)!r} is missing; it holds the options of the run."
            " --overwrite starts again"
        )
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        state["asked"], state["before"]
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"resume: {str(file)!r} is damaged or empty; --overwrite starts again"
        ) from error
    return state

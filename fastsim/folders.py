"""Replacing the model in a folder without losing files of the user.

A manifest in the folder lists the files that fastsim wrote. Only these are ever removed, and only
if they are unchanged. Other files are renamed if they are in the way: files that the user edited, a
file with the name of a new one, and a file that would be loaded as part of the new model.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fastsim.files import OutputError, flush, full_disk_named, unused_old_name
from fastsim.locks import begun_folder, locked, remove_left
from fastsim.manifest import MANIFEST, files_of, is_edited, write_manifest
from fastsim.tell import tell

_LAST = ("config.json", "modules.json", MANIFEST)  # a folder without these is no model
# Files that loaders look for by name: those of another model would be loaded as part of this one.
_READ = ("adapter_config.json", "config.json", "model.safetensors", "modules.json",
         "config_sentence_transformers.json", "sentence_*_config.json", "tokenizer.json",
         "added_tokens.json", "special_tokens_map.json", "*processor_config.json")  # fmt: skip
# The two folders of an exchange, which have the same suffix.
_NEW, _OLD = ".fastsim-new-", ".fastsim-old-"
_PROBE = ".fastsim-probe-"
_LOCK = ".fastsim-exchange.lock"


@contextlib.contextmanager
def replaced_folder(path, say=tell):
    """Yields a new folder, whose files move into `path` if the block ends without an error.

    The new folder is created inside `path`, so that `path` may be a mount point, a link to another
    file system or a folder whose parent is not writable. All new files are on the disk before the
    first is moved. After an error nothing has changed. Links are resolved. Only one process
    exchanges files at a time; it first finishes an exchange that a crash interrupted.

    The files that an earlier manifest lists are removed if they are unchanged. These are renamed to
    their name with `.old`: a listed file that was edited; a file that is not listed and is in the
    way, or is part of another model; a link to a folder that is in the way.

    say: a function of a line of text, called for each renamed file; by default it prints to stderr.

    Raises an OSError if the folder cannot be written, an `OutputError` if the disk is full.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"path: wanted a folder, {str(path)!r} is a file")
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    done = False
    stage, handle = begun_folder(path, _NEW)
    try:
        with full_disk_named(stage, path):
            yield stage
            write_manifest(stage)
            for file in stage.rglob("*"):
                if file.is_file():
                    # Some file systems have no permissions.
                    with contextlib.suppress(PermissionError):
                        file.chmod(0o666 & ~_umask())
                    flush(file)
            with locked(path, _LOCK):
                _finish(path, say)
                _exchange(stage, path, say)
        done = True
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if handle is not None:
            os.close(handle)
        if made and not done:
            with contextlib.suppress(OSError):
                path.rmdir()


def check_writable(path):
    """Tries the last steps of `replaced_folder`; raises an `OutputError` if they would fail."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise OutputError(f"output: wanted a folder, {str(path)!r} is a file")
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for aside in _put_aside_in(path):
            _stage_of(aside, path)
        with tempfile.TemporaryDirectory(prefix=_PROBE, dir=path) as stage:
            probe = Path(stage) / "probe"
            probe.write_text("")
            target = Path(tempfile.mktemp(prefix=_PROBE, dir=path))
            os.rename(probe, target)
            target.unlink()
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"output: cannot write in {str(path)!r}: {error.strerror}") from error
    finally:
        for folder in made:  # the run may never begin
            with contextlib.suppress(OSError):
                folder.rmdir()


def finish_exchanges(path, say=tell):
    """Finishes exchanges that a crash interrupted, after waiting for those of other processes.

    This is always possible: all new files are on the disk before the first is moved.
    """
    if _put_aside_in(path):
        with locked(path, _LOCK):
            _finish(path, say)


def cut_off(path):
    """Whether a crash during an exchange left a folder without a whole model."""
    # The manifest is moved in last.
    return bool(_put_aside_in(path)) and not (Path(path) / MANIFEST).is_file()


def _finish(path, say):
    """`finish_exchanges` for a process that holds the lock."""
    for aside in _put_aside_in(path):
        stage = _stage_of(aside, path)
        if (stage / MANIFEST).is_file():
            _exchange(stage, path, say)
        for folder in (stage, aside):
            shutil.rmtree(folder, ignore_errors=True)
    remove_left(path, _NEW)


def _put_aside_in(path):
    """The folders with the old files of unfinished exchanges."""
    return sorted(Path(path).glob(f"{_OLD}*"))


def _stage_of(aside, path):
    """The folder with the new files of an exchange; `OutputError` if it cannot be finished."""
    stage = _partner(aside, _OLD, _NEW)
    if not (stage / MANIFEST).is_file() and not (path / MANIFEST).is_file():
        raise OutputError(
            f"output: {str(aside)!r} holds files of a model and nothing says where they belong;"
            " move them to where you want them"
        )
    return stage


def _partner(folder, one, other):
    return folder.with_name(folder.name.replace(one, other))


def _exchange(stage, path, say):
    """Moves the staged files in and the files of the old manifest out: all of them or none.

    Called again after a crash, it continues.
    """
    aside = _partner(stage, _NEW, _OLD)
    aside.mkdir(exist_ok=True)
    names = files_of(stage)
    old = files_of(aside) or files_of(path)
    # If some new files are in already, all old ones are out.
    out = old if all((stage / name).is_file() for name in names) else {}
    undo, kept = [], {}

    def move(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        undo.append((target, source))

    def put_aside(place):
        kept[place] = unused_old_name(place)
        move(place, kept[place])

    try:
        # First the files without which a folder is no model: a process that is killed here leaves
        # no half model.
        for name in sorted(out, key=lambda name: name not in _LAST):
            if _in_the_way(path / name, path) != path / name:  # missing, or behind a link
                continue
            if is_edited(path / name, out[name]):
                put_aside(path / name)
            else:
                move(path / name, aside / name)
        for place in (place for name in _READ for place in sorted(path.glob(name))):
            if place.name not in names:
                put_aside(place)
        for name in sorted(names, key=_place):
            if not (stage / name).is_file():
                continue
            blocking = _in_the_way(path / name, path)
            if blocking is not None:
                put_aside(blocking)
            move(stage / name, path / name)
    except BaseException:
        for target, source in reversed(undo):
            source.parent.mkdir(parents=True, exist_ok=True)
            os.rename(target, source)
        for folder in (*sorted(aside.rglob("*"), reverse=True), aside):
            with contextlib.suppress(OSError):
                folder.rmdir()  # a folder with files of an earlier call stays
        raise
    for place, name in kept.items():
        say(f"output: {str(place)!r} is not as fastsim wrote it; it is kept as {name.name!r}")
    shutil.rmtree(aside, ignore_errors=True)
    for name in old:  # remove folders of the old model that are now empty
        for folder in (path / name).parents:
            if folder == path:
                break
            with contextlib.suppress(OSError):
                folder.rmdir()


def _place(name):
    """The sort key of files that move in: those of `_LAST` come last."""
    return _LAST.index(name) if name in _LAST else -1, name


def _in_the_way(target, path):
    """The outermost entry below `path` that is at the place of `target` or of a folder above it.

    Folders above it are not in the way; links to folders are. None if nothing is in the way.
    """
    place = path
    for part in target.relative_to(path).parts:
        place = place / part
        if place == target or place.is_symlink() or not place.is_dir():
            break
    return place if os.path.lexists(place) else None


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask

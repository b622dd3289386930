"""Folders whose files are exchanged for new ones without touching what is the user's.

A manifest in the folder says which files an earlier writing made. Only these are ever removed, as
long as they are as they were written; one that the user edited, and a file of the user's that is in
the way of a new one or would be loaded with it, is put aside under another name.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fastsim.files import OutputError, flush, full_disk_named
from fastsim.locks import begun_folder, locked, remove_left
from fastsim.manifest import MANIFEST, files_of, is_edited, write_manifest
from fastsim.tell import tell

_LAST = ("config.json", "modules.json", MANIFEST)  # without them a folder passes for no model
# What loaders look for by name: of another model, it would be loaded as part of this one.
_READ = ("adapter_config.json", "config.json", "model.safetensors", "modules.json",
         "config_sentence_transformers.json", "sentence_*_config.json", "tokenizer.json",
         "added_tokens.json", "special_tokens_map.json", "*processor_config.json")  # fmt: skip
_NEW, _OLD = ".fastsim-new-", ".fastsim-old-"  # folders of an exchange, of one further name
_PROBE = ".fastsim-probe-"
_LOCK = ".fastsim-exchange.lock"


@contextlib.contextmanager
def replaced_folder(path, say=tell):
    """A new folder whose files take their places in `path` when the block ends without an error.

    Links are resolved. The new folder is made inside `path`, so that a mount point, a link to
    another file system or a parent without permission to write are no hindrance; every file is on
    the disk before the first is exchanged. Removed are the files that the manifest of an earlier
    writing names, as they were written, and no others. A file that was edited since, or is in no
    manifest and in the way, or part of another model, is put aside under its name with `.old`; so
    is a link to a folder that is in the way. say: is told which, by default
    on the error stream. After an error nothing has changed. One process exchanges files at a time,
    and first finishes an exchange that a crash cut off. OSError where the folder cannot be written;
    `OutputError` where the disk is full.
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
                    with contextlib.suppress(PermissionError):  # some file systems have no rights
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
    """Try what `replaced_folder` does at its end; `OutputError` where it cannot be done."""
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
        for folder in made:  # nothing is left of a run that does not begin
            with contextlib.suppress(OSError):
                folder.rmdir()


def finish_exchanges(path, say=tell):
    """Finish what a crash cut off: all new files were on the disk before the first was moved.

    An exchange that another process is at is waited for.
    """
    if _put_aside_in(path):
        with locked(path, _LOCK):
            _finish(path, say)


def cut_off(path):
    """Whether a crash in the middle of an exchange left a folder without a whole model."""
    return bool(_put_aside_in(path)) and not (Path(path) / MANIFEST).is_file()  # it comes last


def _finish(path, say):
    """`finish_exchanges` of a process that holds the lock."""
    for aside in _put_aside_in(path):
        stage = _stage_of(aside, path)
        if (stage / MANIFEST).is_file():
            _exchange(stage, path, say)
        for folder in (stage, aside):
            shutil.rmtree(folder, ignore_errors=True)
    remove_left(path, _NEW)


def _put_aside_in(path):
    """The folders of exchanges that have begun and not ended, with what they took out of `path`."""
    return sorted(Path(path).glob(f"{_OLD}*"))


def _stage_of(aside, path):
    """The folder of the new files of an exchange; `OutputError` where it cannot be finished."""
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
    """Move the staged files in and the old manifest's out; all of it or nothing.

    Called again after a crash it goes on where it was.
    """
    aside = _partner(stage, _NEW, _OLD)
    aside.mkdir(exist_ok=True)
    names = files_of(stage)
    old = files_of(aside) or files_of(path)
    out = old if all((stage / name).is_file() for name in names) else {}  # else all are out
    undo, kept = [], {}

    def move(source, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(source, target)
        undo.append((target, source))

    def put_aside(place):
        kept[place] = _unused(place)
        move(place, kept[place])

    try:
        # A folder without these is no model: so a process that is killed here leaves none by
        # halves.
        for name in sorted(out, key=lambda name: name not in _LAST):
            if _in_the_way(path / name, path) != path / name:  # gone, or beyond a link
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
                folder.rmdir()  # not what an earlier call put there
        raise
    for place, name in kept.items():
        say(f"output: {str(place)!r} is not as fastsim wrote it; it is kept as {name.name!r}")
    shutil.rmtree(aside, ignore_errors=True)
    for name in old:  # folders of the old model that hold nothing now
        for folder in (path / name).parents:
            if folder == path:
                break
            with contextlib.suppress(OSError):
                folder.rmdir()


def _place(name):
    """The order in which files come in."""
    return _LAST.index(name) if name in _LAST else -1, name


def _in_the_way(target, path):
    """The outermost entry below `path` where a file, or a folder above it, has to be, or None."""
    place = path
    for part in target.relative_to(path).parts:
        place = place / part
        if place == target or place.is_symlink() or not place.is_dir():
            break
    return place if os.path.lexists(place) else None


def _unused(place):
    number, name = 1, place.with_name(place.name + ".old")
    while os.path.lexists(name):
        number += 1
        name = place.with_name(f"{place.name}.old{number}")
    return name


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask

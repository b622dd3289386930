"""Locks of folders: for one writing process at a time, and to find folders of killed processes."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fastsim.files import OutputError

_UNNAMED = ".fastsim-unnamed-"


@contextlib.contextmanager
def locked(folder, name, *, refusal=None):
    """Holds the lock `name` of a folder within the block; no other process holds it meanwhile.

    The folder is created if it is missing, and then removed if it stays empty. The operating system
    releases the lock when the process ends, however it ends. A system without file locks does not
    keep other processes out.

    Args:
        folder: a path.
        name: the name of the locked file, which is in the folder during the block.
        refusal: the message of an `OutputError` if another process holds the lock; None: wait.

    Raises:
        OSError: if the folder cannot be written.
    """
    folder = Path(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    handle = _taken(folder, name, refusal)
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)  # before another process can lock it
        _unlock(handle)
        handle.close()
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()


def lock_folder(folder):
    """The handle of a lock on a folder itself; the lock ends when the handle is closed.

    None if another process holds the lock, if it is no folder, or if the system has no such locks.
    """
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (ImportError, AttributeError, OSError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def begun_folder(parent, prefix):
    """(a new folder whose name begins with `prefix`, the handle of the lock on it or None).

    It is locked before it gets its name: `remove_left` removes unlocked folders of that name.
    """
    made = Path(tempfile.mkdtemp(prefix=_UNNAMED, dir=parent))
    handle = lock_folder(made)
    begun = made.with_name(made.name.replace(_UNNAMED, prefix))
    made.replace(begun)
    return begun, handle


def remove_left(parent, prefix):
    """Removes the folders of `begun_folder` of killed processes: those that are not locked."""
    for folder in Path(parent).glob(f"{prefix}*"):
        handle = lock_folder(folder)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _taken(folder, name, refusal):
    """Opens and locks the file `name` in the folder, and returns its handle."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = open(folder / name, "w")  # noqa: SIM115 - `locked` closes it
        except FileNotFoundError:  # an ending process has just removed the folder
            continue
        if not _lock(handle, wait=refusal is None):
            handle.close()
            raise OutputError(refusal)
        try:
            if os.path.samestat(os.fstat(handle.fileno()), os.stat(folder / name)):
                return handle
        except FileNotFoundError:
            pass
        handle.close()  # an ending process has just removed this file: lock the new one


def _lock(handle, *, wait):
    """Locks a file. Returns False if another process holds the lock and `wait` is False."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _unlock(handle):
    """Releases the lock, even if a process forked meanwhile still has the file open."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)

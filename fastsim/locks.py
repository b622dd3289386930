"""Locks of folders: of several processes one at a time writes there, and what one that was killed
has left is known for it.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fastsim.files import OutputError

_UNNAMED = ".fastsim-unnamed-"


@contextlib.contextmanager
def locked(folder, name, *, refusal=None):
    """While this lasts no other process holds the lock `name` of a folder.

    The folder is made if there is none, and removed if it stays empty. The lock is one of the
    system: it ends with its process, however that ends. On a system without file locks no other
    process is noticed.

    Args:
        folder: a path.
        name: of the file that is locked; it is in the folder while this lasts.
        refusal: what an `OutputError` says where another process holds the lock. None: it is
            waited for.

    Raises:
        OSError: where nothing can be written.
    """
    folder = Path(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    handle = _taken(folder, name, refusal)
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)  # before another can have it
        _unlock(handle)
        handle.close()
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()


def lock_folder(folder):
    """The handle of a lock on a folder itself, which ends when that is closed, or the process.

    None where another holds it, it is no folder, or the system has no such locks.
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

    It is locked before it has its name: unlocked, it would be taken for what a killed process left.
    """
    made = Path(tempfile.mkdtemp(prefix=_UNNAMED, dir=parent))
    handle = lock_folder(made)
    begun = made.with_name(made.name.replace(_UNNAMED, prefix))
    made.replace(begun)
    return begun, handle


def remove_left(parent, prefix):
    """Remove what killed processes left of `begun_folder`: their locks ended with them."""
    for folder in Path(parent).glob(f"{prefix}*"):
        handle = lock_folder(folder)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _taken(folder, name, refusal):
    """The open file that holds the lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = open(folder / name, "w")  # noqa: SIM115 - `locked` closes it
        except FileNotFoundError:  # a process that ended has just removed the folder
            continue
        if not _lock(handle, wait=refusal is None):
            handle.close()
            raise OutputError(refusal)
        try:
            if os.path.samestat(os.fstat(handle.fileno()), os.stat(folder / name)):
                return handle
        except FileNotFoundError:
            pass
        handle.close()  # the file of a process that has just ended


def _lock(handle, *, wait):
    """Lock a file. False where another process holds it, which is not waited for."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _unlock(handle):
    """For processes that were forked meanwhile too, which have the file open."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)

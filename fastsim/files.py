"""Files that are written whole or not at all, their hashes, and the errors of a full disk."""

import contextlib
import errno
import hashlib
import os
import tempfile
import uuid
from pathlib import Path

from fastsim.tell import tell

# Parts of the messages of safetensors and torch.save for a full disk; these errors have no errno.
_FULL = ("No space left", "os error 28", "PytorchStreamWriter failed", "unexpected pos")


class OutputError(OSError):
    """A file or folder cannot be written; the message gives the reason in one line."""


@contextlib.contextmanager
def whole_file(path, *, keep=False):
    """Yields the path of a new file, which replaces `path` if the block ends without an error.

    The new file is beside `path` under an unused name. After an error it is removed, and `path` is
    unchanged. It gets the permissions of the file that it replaces, or those of a new file. Links
    are followed. Raises an `OutputError` if the file cannot be written or the disk is full.

    keep: whether a file that is at `path` in the end, since another process made it meanwhile, is
    kept: it is renamed to its name with `.old`, which is told.
    """
    path = Path(os.path.realpath(path))
    old = path.exists() and not keep
    if old and not path.is_file():
        raise OutputError(f"cannot write {str(path)!r}: it is there and is not a file")
    part = path.with_name(unused_name(".", ".part"))  # never too long, however long `path` is
    try:
        part.touch(exist_ok=False)
        mode = (path if old else part).stat().st_mode
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    try:
        with full_disk_named(path):
            part.chmod(mode)  # before anything is in it that others must not read
            yield part
            part.chmod(mode)  # some libraries create a file that only its owner can read
            flush(part)
            if keep:
                _rename_without_loss(part, path)
            else:
                part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _rename_without_loss(part, path):
    """Moves `part` to `path`; whatever is at `path` is renamed first."""
    while True:
        if os.path.lexists(path):
            name = unused_old_name(path)
            with contextlib.suppress(FileNotFoundError):  # removed by now
                os.rename(path, name)
                tell(f"{str(path)!r} was made by another process; it is kept as {name.name!r}")
        try:
            os.link(part, path)  # a renaming would overwrite a file made in this moment
            return part.unlink()
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            return part.replace(path)


def check_new_file(name, path):
    """Raises an `OutputError` if `whole_file` could not write; to be called before long work.

    name: the name of the argument, for the message.
    """
    path = Path(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OutputError(f"{name}: cannot write {str(path)!r}: {error.strerror}") from error


def write_whole(path, text, *, keep=False):
    """Writes a text file, whole or not at all; keep: as for `whole_file`."""
    with whole_file(path, keep=keep) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def full_disk_named(place, output=None):
    """Turns an error of a full disk, of any library, into an `OutputError` that names the file.

    place: the file, or its folder; the newest file in the folder is named if the error names none.
    output: a path that is unchanged after the error, for the message.
    """
    try:
        yield
    except OutputError:
        raise
    except Exception as error:
        if not is_full_disk(error):
            raise
        name = place
        if Path(place).is_dir():
            name = getattr(error, "filename", None) or _newest(place) or place
        kept = "" if output is None else f"; what was in {str(output)!r} is as it was"
        raise OutputError(errno.ENOSPC, f"disk full: cannot write {str(name)!r}{kept}") from error


def is_full_disk(error):
    """Whether an error, or an error that caused it, says that the disk is full."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(part in str(error) for part in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _newest(folder):
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def flush(file):
    """Waits until a file is on the disk."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def fingerprint(path):
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def unused_old_name(path):
    """A path beside `path` where nothing is: its name with `.old`, or `.old` and a number."""
    number, name = 1, path.with_name(path.name + ".old")
    while os.path.lexists(name):
        number += 1
        name = path.with_name(f"{path.name}.old{number}")
    return name


def unused_name(prefix, suffix=""):
    """A name that no other thread, process or machine uses."""
    return f"{prefix}{uuid.uuid4().hex}{suffix}"

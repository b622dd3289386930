"""Files that are there whole or not at all, what is in them, and the errors of a full disk."""

import contextlib
import errno
import hashlib
import os
import tempfile
import uuid
from pathlib import Path

# What safetensors and torch.save say of a full disk, whose errors have no number.
_FULL = ("No space left", "os error 28", "PytorchStreamWriter failed", "unexpected pos")


class OutputError(OSError):
    """A file or folder that cannot be written; the message says why, in one line."""


@contextlib.contextmanager
def whole_file(path):
    """The path of a new file that takes the place of `path` when the block ends without an error.

    It is beside `path` under a name that no other file has; after an error it is gone and `path`
    as it was. It has the rights of the file that was there, or of any new one. A link is followed.
    `OutputError` where nothing can be written, or the disk is full.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OutputError(f"cannot write {str(path)!r}: it is there and is not a file")
    part = path.with_name(unused_name(".", ".part"))  # as long for every name
    try:
        part.touch(exist_ok=False)
        mode = (path if path.exists() else part).stat().st_mode
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    try:
        with full_disk_named(path):
            part.chmod(mode)  # before anything is in it that not all may read
            yield part
            part.chmod(mode)  # some libraries make a file that only its owner can read
            flush(part)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_new_file(name, path):
    """`OutputError` where `whole_file` could write nothing: found out before the work is done.

    name: of the argument.
    """
    path = Path(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OutputError(f"{name}: cannot write {str(path)!r}: {error.strerror}") from error


def write_whole(path, text):
    """A text file that is there whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def full_disk_named(place, output=None):
    """Turn the several errors of a full disk into an `OutputError` that says so and where.

    place: the file, or the folder whose newest file it is, where the error names none.
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
    """Whether an error, or one that it came from, says that the disk is full."""
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
    """Wait until a file is on the disk."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def fingerprint(path):
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def unused_name(prefix, suffix=""):
    """A name that no other thread, process or machine takes."""
    return f"{prefix}{uuid.uuid4().hex}{suffix}"

"""Folders that are there whole or not at all."""

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
from pathlib import Path

# Entries of an old model folder that a new model must not inherit.
_OF_A_MODEL = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*",
    "modules.json",
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "tokenizer*",
    "vocab.*",
    "special_tokens_map.json",
    "merges.txt",
    "fastsim_*.json",
    "[0-9]_*",
)


@contextlib.contextmanager
def replaced_folder(path):
    """A new folder beside `path` that takes its place when the block ends without an error.

    What the old folder held beyond a model (checkpoints, logs, notes) is moved into the new one.
    After an error nothing has changed. OSError where the folder cannot be made or moved.
    """
    path = Path(os.path.abspath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"path: wanted a folder, {str(path)!r} is a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{path.name}.new-", dir=path.parent))
    try:
        yield stage
        stage.chmod(0o777 & ~_umask())  # mkdtemp's folders are the user's alone
        for file in stage.rglob("*"):
            if file.is_file():
                _flush(file)
        if not path.exists():
            stage.rename(path)
            return
        _exchange(stage, path)
        for entry in stage.iterdir():
            inherits = not any(entry.match(pattern) for pattern in _OF_A_MODEL)
            if inherits and not (path / entry.name).exists():
                entry.rename(path / entry.name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _exchange(new, old):
    """Swap two folders: in one step where the system can, else by two renames."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if rename and not rename(at_cwd, bytes(new), at_cwd, bytes(old), exchange):
            return
    aside = new.with_name(new.name + "-old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)


def _flush(file):
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""The manifest of the files that fastsim wrote into a folder: names, sizes, times and hashes."""

import json
from pathlib import Path

from fastsim.files import fingerprint

MANIFEST = "fastsim_manifest.json"


def write_manifest(folder):
    """Writes the manifest of all files in a new folder; they must not change afterwards."""
    folder, about = Path(folder), {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        now = file.stat()
        about[str(file.relative_to(folder))] = {
            "bytes": now.st_size,
            "mtime_ns": now.st_mtime_ns,
            "sha256": fingerprint(file),
        }
    text = json.dumps({"files": about}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def files_of(folder):
    """{relative path: its entry in the folder's manifest}; empty without a manifest.

    The entry is None for the manifest itself, and for files of old manifests, which held only
    names.
    """
    try:
        text = (Path(folder) / MANIFEST).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        about = files if isinstance(files, dict) else dict.fromkeys(files)
        inside = {
            name: written
            for name, written in about.items()
            if not Path(name).is_absolute() and ".." not in Path(name).parts
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {**inside, MANIFEST: None}


def is_edited(file, written):
    """Whether a file is known to differ from its manifest entry `written`.

    The file is read only if its time has changed: a model can have gigabytes.
    """
    if not file.is_file():
        return True
    if written is None:
        return False
    now = file.stat()
    if now.st_size != written["bytes"]:
        return True
    return now.st_mtime_ns != written["mtime_ns"] and fingerprint(file) != written["sha256"]

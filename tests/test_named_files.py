"""Files that comments, docstrings and pages name by a path exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("fastsim", "csrc", "tests", "bench")
SUFFIXES = ("py", "h", "cpp", "cu", "cuh", "inc")
BASES = ROOT / "fastsim", ROOT / "csrc"
ELSEWHERE = {
    "model/code.py",  # a test writes it
    "tests/losses/test_cross_batch_memory.py",  # of pytorch-metric-learning
}
SYSTEM = re.compile(r"#include <.*")
PATH = re.compile(rf"(?<![\w/.:-])((?:[\w-]+/)+[\w-]+\.(?:{'|'.join(SUFFIXES)}))\b")


def _files():
    for folder in FOLDERS:
        for suffix in (*SUFFIXES, "md"):
            yield from (ROOT / folder).rglob(f"*.{suffix}")


def _missing(text, beside):
    return [
        path
        for path in PATH.findall(SYSTEM.sub("", text))
        if path not in ELSEWHERE
        and not any((folder / path).exists() for folder in (*BASES, *beside.parents, beside))
    ]


def test_named_files_exist():
    files = list(_files())
    assert len(files) > 100
    missing = {
        str(file.relative_to(ROOT)): found
        for file in files
        if (found := _missing(file.read_text(encoding="utf-8"), file.parent))
    }
    assert not missing, missing


def test_a_missing_one_is_seen():
    absent = "fastsim/" + "absent.py"
    assert _missing(f"#include <sys/{absent}>\nas in {absent}, which", ROOT) == [absent]

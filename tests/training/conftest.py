"""What the tests of training share."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def empty_pictures(monkeypatch):
    if importlib.util.find_spec("matplotlib") is not None:
        from tests.training.pictures import leave_empty

        leave_empty(monkeypatch.setattr)


@pytest.fixture
def files(tmp_path):
    """kind -> (training file, held-out file)."""
    from fastsim.training import demo
    from tests.training.runs import HELD, KEPT, rows_of, write

    def make(kind):
        if kind == "scored pairs":
            return (
                demo.write_pairs(KEPT[:12], tmp_path / "train.jsonl"),
                demo.write_pairs(HELD[:6], tmp_path / "held.jsonl"),
            )
        parts = (("train", KEPT[:20]), ("held", HELD))
        return tuple(write(tmp_path / f"{name}.jsonl", rows_of(kind, s)) for name, s in parts)

    return make

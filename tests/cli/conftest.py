"""What the tests of the command line share."""

import json

import pytest


@pytest.fixture
def tuples(tmp_path):
    """A file of 24 anchors and positives."""
    from fastsim.training import demo

    kept, _ = demo.situations()
    rows = [{"anchor": row[0], "positive": row[1]} for row in kept[:24]]
    path = tmp_path / "tuples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

"""Schedules of the learning rate: followed, or refused before anything is removed."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training.run import train
from tests.training.runs import options


def test_the_rate_follows_its_schedule(files, tmp_path):
    file, _ = files("tuples")
    found = []
    for schedule in ("constant", "linear"):
        asked = options(tmp_path, file, loss="info_nce", max_steps=6, schedule=schedule)
        asked.warmup, asked.output = 0.5, str(tmp_path / schedule)
        history = train(asked)["history"]
        found.append([entry["learning_rate"] / 1e-3 for entry in history if "loss" in entry])
    assert found[0] == pytest.approx([1] * 6)
    assert found[1] == pytest.approx([0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3])


def test_a_schedule_that_would_divide_by_zero_when_all_is_trained(files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=3, schedule="polynomial")
    asked.warmup, asked.keep_checkpoints = 2.0, True
    assert train(asked)["steps"] == 3
    kept = {path.name for path in (tmp_path / "out-checkpoints").iterdir()}
    asked.overwrite = True
    for name, value, reason in (
        ("warmup", 3.0, r"warmup: wanted fewer steps than the 3 .*'polynomial', got 3"),
        ("learning_rate", 1e-8, r"schedule: polynomial: lr_end"),
    ):
        before = getattr(asked, name)
        setattr(asked, name, value)
        for dry_run in (True, False):
            with pytest.raises(ValueError, match=reason):
                train(asked, dry_run=dry_run)
        setattr(asked, name, before)
        assert {path.name for path in (tmp_path / "out-checkpoints").iterdir()} == kept


@pytest.mark.parametrize(
    ("warmup", "schedule", "told"),
    [
        (4.0, "linear", True),
        (3.0, "linear", False),
        (1.0, "cosine", False),
        (4.0, "constant", False),
    ],
)
def test_a_warm_up_longer_than_the_training_is_told(warmup, schedule, told, files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=3, schedule=schedule)
    asked.warmup, said = warmup, []
    train(asked, said.append, dry_run=True)
    note = "warmup: the training ends after 3 of 4 steps of warm-up"
    assert any(line.startswith(note) for line in said) == told
    assert told or not any(line.startswith("warmup") for line in said)

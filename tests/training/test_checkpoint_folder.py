"""The folder of checkpoints while another run ends in it."""

import os
import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.files import OutputError
from fastsim.training.checkpoints import claimed, written


def test_a_folder_that_vanishes_holds_no_checkpoints(tmp_path, monkeypatch):
    """A run that ends removes its folder: perhaps just when another looks into it."""
    folder = tmp_path / "run-checkpoints"

    def vanishing(look):
        def of(place):
            if str(place) == str(folder):
                shutil.rmtree(folder, ignore_errors=True)
            return look(place)

        return of

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, vanishing(getattr(os, name)))
    folder.mkdir()
    assert written(folder) == []
    folder.mkdir()
    with claimed(folder, tmp_path / "run"):
        assert folder.is_dir()
    assert not folder.exists()


def test_a_step_is_written_in_plain_digits(tmp_path):
    (tmp_path / "checkpoint-²").mkdir()
    with pytest.raises(OutputError, match="checkpoint-²' is not a checkpoint of fastsim"):
        written(tmp_path)


def test_a_folder_that_a_resumed_run_has_emptied_is_removed(tmp_path):
    folder = tmp_path / "run-checkpoints"
    folder.mkdir()
    (folder / "left").touch()
    with claimed(folder, tmp_path / "run"):
        (folder / "left").unlink()
    assert not folder.exists()

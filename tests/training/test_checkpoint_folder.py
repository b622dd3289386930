"""The folder of checkpoints while another run ends in it."""

import os
import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
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

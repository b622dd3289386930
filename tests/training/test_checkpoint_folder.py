"""The folder of checkpoints: where it is, and that another run may end in it."""

import os
import shutil

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.files import OutputError
from fastsim.training.checkpoints import RUN, checkpoint_folder, claimed, written


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


@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_the_root_is_no_output(chosen):
    with pytest.raises(OutputError, match=r"output: wanted a folder other than .*, got '/\.'"):
        checkpoint_folder("/.", chosen)


def test_checkpoints_stay_in_a_mounted_output(tmp_path, monkeypatch):
    """Though a run that was killed before it wrote its file has left their folder there."""
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    assert checkpoint_folder(out) == tmp_path / "out-checkpoints"
    monkeypatch.setattr(os.path, "ismount", lambda path: path == out)
    assert checkpoint_folder(out) == out / "checkpoints"


def test_a_run_goes_on_where_its_checkpoints_are(tmp_path):
    """In the output, which was mounted when it began, unless one beside it has begun since."""
    out, beside = tmp_path / "out", tmp_path / "out-checkpoints"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / RUN).touch()
    assert checkpoint_folder(out) == out / "checkpoints"
    beside.mkdir()
    assert checkpoint_folder(out) == beside

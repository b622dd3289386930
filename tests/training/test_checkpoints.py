"""Checkpoints: what is the user's beside them stays, and they are those of one run."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from safetensors.torch import load_file

from fastsim.training import checkpoints as saved
from fastsim.training import demo
from fastsim.training.checkpoints import checkpoint_folder, claimed
from fastsim.training.run import OutputError, train
from fastsim.training.stopping import Watch
from fastsim.training.trainer import Trainer
from tests import models
from tests.training.runs import losses, options, stopped


def test_the_newest_checkpoint_is_that_of_the_most_steps(tmp_path):
    """As numbers: 9, 10 and 100, whatever the order of their names."""
    for step in (10, 100, 9):
        saved.begin(tmp_path / f"checkpoint-{step}")
        saved.seal(tmp_path / f"checkpoint-{step}")
    assert [path.name for path in saved.written(tmp_path)] == [
        "checkpoint-100",
        "checkpoint-10",
        "checkpoint-9",
    ]
    assert saved.newest_complete(tmp_path) == (tmp_path / "checkpoint-100", [])
    saved.remove_older(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-100", "checkpoint-10"}


@pytest.mark.parametrize("name", ["checkpoint-500", "checkpoint-2-mine", "checkpoint-best"])
def test_folders_of_others_are_refused_and_stay(name, files, tmp_path):
    """transformers would remove them when there are more checkpoints than it keeps."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=2, checkpoint_steps=1)
    asked.checkpoints, asked.keep_checkpoints = str(tmp_path / "mine"), True
    train(asked)
    theirs = tmp_path / "mine" / name
    theirs.mkdir()
    (theirs / "weights").write_text("mine")
    (tmp_path / "mine/notes").mkdir()
    for resume, overwrite in ((False, False), (False, True), (True, False)):
        asked.resume, asked.overwrite = resume, overwrite
        with pytest.raises(OutputError, match=f"{name}' is not a checkpoint of fastsim"):
            train(asked)
        assert (theirs / "weights").read_text() == "mine"
    shutil.rmtree(theirs)
    asked.overwrite, asked.resume, asked.keep_checkpoints = True, False, False
    train(asked)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_put_beside_checkpoints_during_a_run_stays(
    keep,
    files,
    tmp_path,
    monkeypatch,
):
    """Such as a copy of a checkpoint: of the run's own, two are kept at most."""
    file, _ = files("tuples")
    checkpoints, copies = tmp_path / "out-checkpoints", []
    saved = Watch.on_save

    def copy(self, args, state, control, **more):
        saved(self, args, state, control, **more)
        assert len(list(checkpoints.glob("checkpoint-*"))) <= 2 + len(copies)
        if state.global_step == 1:
            for name in ("checkpoint-best", "checkpoint-1-mine"):
                copies.append(checkpoints / name)
                shutil.copytree(checkpoints / "checkpoint-1", copies[-1])

    monkeypatch.setattr(Watch, "on_save", copy)
    asked = options(tmp_path, file, loss="info_nce", max_steps=5, checkpoint_steps=1)
    asked.keep_checkpoints = keep
    train(asked)
    assert all((copy / "model.safetensors").is_file() for copy in copies)
    own = {"checkpoint-4", "checkpoint-5", "fastsim_run.json"} if keep else set()
    assert {path.name for path in checkpoints.iterdir()} == own | {copy.name for copy in copies}


def test_a_removal_that_is_cut_off_is_no_hindrance(
    files,
    tmp_path,
    monkeypatch,
):
    """What is left of a checkpoint does not pass for a folder of the user's."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=4, checkpoint_steps=1)
    asked.keep_checkpoints = True

    remove = shutil.rmtree

    def cut_off(path, *arguments, **more):
        if not (Path(path) / "fastsim_checkpoint.json").is_file():
            return remove(path, *arguments, **more)
        (Path(path) / "fastsim_checkpoint.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            train(asked)
    asked.resume = True
    assert train(asked)["steps"] == 4
    asked.resume, asked.overwrite, asked.keep_checkpoints = False, True, False
    train(asked)
    assert not (tmp_path / "out-checkpoints").exists()


def test_a_checkpoint_is_not_written_into_a_folder_of_the_users(
    files,
    tmp_path,
    monkeypatch,
):
    file, _ = files("tuples")
    theirs = tmp_path / "out-checkpoints/checkpoint-2"
    begin = Watch.on_train_begin

    def make(self, args, state, control, **more):
        begin(self, args, state, control, **more)
        theirs.mkdir()
        (theirs / "notes").write_text("mine")

    monkeypatch.setattr(Watch, "on_train_begin", make)
    asked = options(tmp_path, file, loss="info_nce", max_steps=3, checkpoint_steps=1)
    with pytest.raises(OutputError, match="checkpoint-2' is not a checkpoint of fastsim"):
        train(asked)
    assert [path.name for path in theirs.iterdir()] == ["notes"]


def test_a_checkpoint_that_fails_leaves_a_folder_of_the_users(files, tmp_path, monkeypatch):
    """It was made after the look whether the name is free."""
    from fastsim.training import trainer

    begin, theirs = trainer.begin, tmp_path / "out-checkpoints/checkpoint-1"

    def make(folder):
        theirs.mkdir()
        (theirs / "notes").write_text("mine")
        begin(folder)

    monkeypatch.setattr(trainer, "begin", make)
    file, _ = files("tuples")
    with pytest.raises(OSError, match="checkpoint-1"):
        train(options(tmp_path, file, loss="info_nce", max_steps=1))
    assert [path.name for path in theirs.iterdir()] == ["notes"]


def test_a_checkpoint_that_fails_takes_no_room(files, tmp_path, monkeypatch):
    """Not every library raises an OSError where the disk is full."""
    from fastsim.training import trainer

    def fails(*arguments):
        raise RuntimeError("iostream error")

    monkeypatch.setattr(trainer, "write_sums", fails)
    file, _ = files("tuples")
    with pytest.raises(RuntimeError, match="iostream error"):
        train(options(tmp_path, file, loss="info_nce", max_steps=1))
    assert [path.name for path in (tmp_path / "out-checkpoints").iterdir()] == ["fastsim_run.json"]


def test_the_demo_leaves_checkpoints_alone(tmp_path):
    theirs = tmp_path / "out-checkpoints/checkpoint-3"
    theirs.mkdir(parents=True)
    demo.run(str(models.tiny_bert()), str(tmp_path / "out"), epochs=0.1, progress=False, cpu=True)
    assert theirs.is_dir()
    assert [path.name for path in theirs.parent.iterdir()] == ["checkpoint-3"]


def test_checkpoints_are_those_of_one_run(files, tmp_path):
    """A second would choose as best, resume from and remove those of the first."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=4, checkpoint_steps=2)
    folder = checkpoint_folder(asked.output)
    other = pytest.raises(OutputError, match=f"another run is writing to '{folder}'")
    held = []
    end = Watch.on_step_end

    def told(self, args, state, control, **more):
        with other, claimed(folder, asked.output):
            pass
        held.append(state.global_step)
        end(self, args, state, control, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "on_step_end", told)
        stopped(asked, 3)
    assert held == [1, 2, 3]
    before = sorted(folder.rglob("*"))
    with claimed(folder, asked.output):
        for overwrite, resume in ((False, False), (True, False), (False, True)):
            with other:
                train(replace(asked, overwrite=overwrite, resume=resume))
    assert sorted(folder.rglob("*")) == before
    assert train(asked)["steps"] == 4
    assert not folder.exists()


def test_an_output_is_that_of_one_run(files, tmp_path):
    """Wherever its checkpoints are."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=1)
    with (
        claimed(tmp_path / "elsewhere", asked.output),
        pytest.raises(OutputError, match=f"output: another run is writing to '{asked.output}'"),
    ):
        train(asked)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_a_refused_run_leaves_no_folder(files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=1, resume=True)
    asked.checkpoints = str(tmp_path / "new/folder")
    with pytest.raises(OutputError, match="no complete checkpoint"):
        train(asked)
    asked.checkpoints = file
    for dry_run in (True, False):
        with pytest.raises(OutputError, match="checkpoints: wanted a folder, got the file"):
            train(asked, dry_run=dry_run)
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "held.jsonl"}


def test_a_run_that_never_got_to_a_checkpoint_is_no_hindrance(files, tmp_path):
    file, _ = files("tuples")
    asked = options(
        tmp_path, file, loss="info_nce", max_steps=4, learning_rate=1e30, logging_steps=100
    )
    with pytest.raises(FloatingPointError):
        train(asked)
    asked.learning_rate = 1e-3
    assert train(asked)["steps"] == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", "foo"),
        ("schedule", "inverse_sqrt_of_nothing"),
        ("report_to", "no-such-place"),
        ("loss_options", {"temperature": "abc"}),
        ("loss_options", {"temprature": 0.1}),
        ("loss_options", {"group": 1}),
        ("loss_learning_rate", 0.1),
        ("prompts", {"querry": "q: "}),
        ("eval_steps", 3),
        ("eval_columns", "anchor,positive"),
        ("best_metric", "ndcg@10"),
        ("score_range", (0.0, 5.0)),
        ("checkpoints", ""),
    ],
)
def test_what_cannot_run_is_refused_by_a_dry_run_too(name, value, files, tmp_path):
    file, _ = files("tuples")
    shown = {"loss_options": "loss_options", "prompts": "prompt"}.get(name, name)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=f"{shown}: "):
            train(options(tmp_path, file, loss="info_nce", **{name: value}), dry_run=dry_run)
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "held.jsonl"}


def test_a_dry_run_refuses_checkpoints_that_are_there(files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=2, keep_checkpoints=True)
    train(asked)
    with pytest.raises(OutputError, match="holds checkpoints of an earlier run"):
        train(asked, dry_run=True)
    asked.resume, asked.max_steps = True, 1
    with pytest.raises(ValueError, match="max_steps: wanted 2 or more"):
        train(asked, dry_run=True)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_run_goes_on_with_as_many_processes(dry_run, files, tmp_path):
    """One that was written without their number, with any."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=2, keep_checkpoints=True)
    train(asked)
    asked.resume = True
    about = tmp_path / "out-checkpoints/fastsim_run.json"
    state = json.loads(about.read_text())
    state["asked"]["processes"] = 2
    about.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="resume: processes: wanted 2, as in this run, got 1"):
        train(asked, dry_run=dry_run)
    del state["asked"]["processes"]
    about.write_text(json.dumps(state))
    train(asked, dry_run=dry_run)


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_tied_weights_are_in_checkpoints(kind, files, tmp_path):
    """Under each of their names, and a run goes on with them."""
    from tests.encoders.test_sentence_transformers import encoder_of_two

    encoder_of_two(kind, tmp_path / "model")
    file, _ = files("tuples")
    more = {"model": str(tmp_path / "model"), "loss": "info_nce", "max_steps": 4}
    more |= {"checkpoint_steps": 2, "keep_checkpoints": True}
    whole = train(options(tmp_path, file, output=str(tmp_path / "whole"), **more))
    asked = options(tmp_path, file, **more)
    stopped(asked, 3)
    saved = load_file(tmp_path / "out-checkpoints/checkpoint-3/model.safetensors")
    one, two = (
        saved[f"encoder.model.{name}.weight"] for name in ("shared", "encoder.embed_tokens")
    )
    assert torch.equal(one, two)
    assert losses(train(asked)) == losses(whole)


def test_what_is_refused_in_a_run_removes_no_checkpoint(files, tmp_path):
    file, held = files("scored pairs")
    asked = options(tmp_path, file, max_steps=2, eval=held, keep_checkpoints=True)
    train(asked)
    checkpoints = checkpoint_folder(asked.output)
    before = sorted(path.name for path in checkpoints.iterdir())
    with pytest.raises(ValueError, match=r"best_metric: wanted one of .*, got 'spearmen'"):
        train(replace(asked, overwrite=True, best_metric="spearmen"), dry_run=True)
    assert sorted(path.name for path in checkpoints.iterdir()) == before
    with pytest.raises(ValueError, match="overwrite: cannot be combined with resume"):
        replace(asked, overwrite=True, resume=True)


@pytest.mark.parametrize("mine", [True, False])
def test_an_empty_folder_stays_where_it_is_the_users(mine, tmp_path):
    folder = tmp_path / "below" / "checkpoints"
    if mine:
        folder.mkdir(parents=True)
    with claimed(folder, folder):
        assert folder.is_dir()
    assert folder.exists() == (tmp_path / "below").exists() == mine


@pytest.mark.parametrize("more", [{"accumulate": 2, "batch_size": 4}, {"logging_steps": 2}])
def test_the_end_tells_of_all_parts(more, files, tmp_path, monkeypatch):
    """Loss, time and speed: of the steps before it was resumed too, logged or not."""
    file, _ = files("tuples")
    more = {"loss": "info_nce", "max_steps": 7, "keep_checkpoints": True} | more
    whole = train(options(tmp_path, file, output=str(tmp_path / "whole"), **more))
    asked = options(tmp_path, file, **more)
    for step in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "seconds", lambda self, step=step: 1000.0 * step)
            stopped(asked, step)
    found = train(asked)
    last, wanted = found["history"][-1], whole["history"][-1]
    assert last.keys() == wanted.keys()
    assert last["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-6)
    assert 4000 < found["seconds"] == last["train_runtime"] < 4900
    assert last["train_samples_per_second"] == pytest.approx(7 * 8 / found["seconds"], abs=5.1e-4)
    again = train(asked)  # nothing is left to do
    assert 4000 < again["seconds"] < 4900


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged(tmp_path, monkeypatch):
    """What is damaged is passed over, and removed."""
    for step in (1, 2):
        saved.begin(tmp_path / f"checkpoint-{step}")
        saved.seal(tmp_path / f"checkpoint-{step}")
    read = Path.read_text

    def fails(path, **options):
        if path.parent.name == "checkpoint-2":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        with pytest.raises(OutputError, match="checkpoint-2': Input/output error"):
            saved.newest_complete(tmp_path)
    assert saved.newest_complete(tmp_path) == (tmp_path / "checkpoint-2", [])

"""Runs that are cut off and go on: SIGKILL, SIGTERM, damaged checkpoints, longer runs, NaN."""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.encoders.encoder import Encoder
from fastsim.training import demo
from fastsim.training.checkpoints import begin
from fastsim.training.prepare import prepare
from fastsim.training.run import Options, OutputError, train
from fastsim.training.trainer import Trainer
from tests import models
from tests.training.processes import LIMIT, start
from tests.training.runs import KEPT, losses, options, rows_of, stopped, write


def wait_for(path, process):
    end = time.monotonic() + LIMIT
    while not path.exists() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.002)
    assert path.exists()


def untimed(history):
    """The entries of a history without what a clock measured."""
    ends = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(ends)} for entry in history]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A loss -> (its data, the options of a run, what the run without a break found)."""

    @functools.cache
    def run(loss):
        folder = tmp_path_factory.mktemp(loss)
        if loss == "cosent":
            file = demo.write_pairs(KEPT[:12], folder / "train.jsonl")
        else:
            file = write(folder / "train.jsonl", rows_of("tuples", KEPT[:20]))
        more = {"loss": loss, "checkpoint_steps": 4, "max_steps": 40, "keep_checkpoints": True}
        whole = train(options(folder, file, **more))
        assert round(1 / whole["history"][0]["epoch"]) > 4  # so that the end is inside an epoch
        return file, more, whole, folder / "out"

    return run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_cut_off_and_resumed_is_the_unbroken_run(number, unbroken, tmp_path, capsys):
    killed = number == signal.SIGKILL
    file, more, whole, out = unbroken("info_nce" if killed else "cosent")
    asked = options(tmp_path, file, output=str(tmp_path / "cut"), **more)
    process = start(asked, tmp_path / "said", waits_at=20)
    checkpoints = tmp_path / "cut-checkpoints"
    wait_for(checkpoints / "checkpoint-8/trainer_state.json", process)
    os.kill(process.pid, number)
    process.join()
    said = (tmp_path / "said").read_text()
    assert not (tmp_path / "cut/modules.json").exists()  # nothing half-done passes for a model
    if killed:
        assert process.exitcode == -number
        broken = checkpoints / "checkpoint-99"  # cut off while it was being written
        begin(broken)
        (broken / "model.safetensors").write_bytes(b"x")
    else:
        assert f"{signal.Signals(number).name} ended the run after step" in said
        assert "Continue with the same command and --resume" in said
    asked.resume = True
    asked.logging_steps = 1
    resumed = train(asked)
    if killed:
        assert "checkpoint-99 cannot be used: it was interrupted" in capsys.readouterr().err
    assert losses(resumed) == losses(whole)
    texts = models.texts(10)
    one, two = (Encoder.from_pretrained(path) for path in (out, tmp_path / "cut"))
    assert torch.equal(one.encode(texts), two.encode(texts))


def test_going_on_within_a_later_epoch_takes_the_batches_of_that_epoch(unbroken, tmp_path):
    file, more, whole, _ = unbroken("info_nce")
    asked = options(tmp_path, file, output=str(tmp_path / "cut"), **more)
    stopped(asked, 8)
    assert 1 < 8 * whole["history"][0]["epoch"] < 2
    assert losses(train(asked)) == losses(whole)


def test_damage_falls_back_and_a_finished_run_stays(files, tmp_path, capsys):
    file, held = files("tuples")
    more = {"loss": "info_nce", "checkpoint_steps": 3, "keep_checkpoints": True}
    asked = options(tmp_path, file, max_steps=6, **more)
    whole = train(asked)
    texts = models.texts(10)
    vectors = Encoder.from_pretrained(asked.output).encode(texts)
    checkpoints = tmp_path / "out-checkpoints"
    asked.resume = True
    again = train(asked)  # all steps are done: nothing is trained
    assert again["steps"] == 6
    assert untimed(again["history"]) == untimed(whole["history"])
    assert torch.equal(Encoder.from_pretrained(asked.output).encode(texts), vectors)

    newest = checkpoints / "checkpoint-6"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"):
        kept = (newest / name).read_bytes()
        (newest / name).write_bytes(kept[: len(kept) // 2])
        from fastsim.training.checkpoints import damage

        assert f"{name} has {len(kept) // 2} bytes instead of {len(kept)}" in damage(newest)
        (newest / name).write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        assert f"{name} has changed since it was written" in damage(newest)
        (newest / name).unlink()
        assert damage(newest) == f"{name} is missing"
        if name != "model.safetensors":
            (newest / name).write_bytes(kept)
    resumed = train(asked)
    said = capsys.readouterr().err
    assert "checkpoint-6 cannot be used: model.safetensors is missing" in said
    assert "continuing from checkpoint-3" in said
    assert losses(resumed) == losses(whole)

    # Longer, with other logging, an evaluation and the same data at another path.
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(file).read_bytes())
    asked.max_steps, asked.logging_steps, asked.eval, asked.train = 8, 2, held, str(moved)
    longer = train(asked)
    assert longer["steps"] == 8
    assert longer["before"] is not None

    asked.max_steps = 7
    with pytest.raises(ValueError, match="resume: max_steps: wanted 8 or more"):
        train(asked)
    asked.max_steps, asked.batch_size = 8, 4
    with pytest.raises(ValueError, match="resume: batch_size: wanted 8, as in this run, got 4"):
        train(asked)
    asked.batch_size = 8
    with open(moved, "a") as handle:
        handle.write('{"anchor": "new", "positive": "row"}\n')
    with pytest.raises(ValueError, match="resume: data: wanted the data of this run"):
        train(asked)
    asked.train = file
    (checkpoints / "fastsim_run.json").write_text("")
    with pytest.raises(OutputError, match=r"run.json' is damaged or empty"):
        train(asked)
    (checkpoints / "fastsim_run.json").unlink()
    with pytest.raises(OutputError, match=r"run.json' is missing"):
        train(asked)
    asked.resume = False
    with pytest.raises(OutputError, match="--resume continues it, --overwrite starts again"):
        train(asked)
    asked.overwrite, asked.keep_checkpoints, asked.max_steps, asked.eval = True, False, 1, None
    assert train(asked)["steps"] == 1
    assert not checkpoints.exists()
    asked.resume = True
    with pytest.raises(OutputError, match="resume: no complete checkpoint"):
        train(asked)


@pytest.mark.parametrize(("kind", "loss"), [("scored pairs", "cosent"), ("tuples", "info_nce")])
def test_pictures_are_of_the_evaluation_data_that_come_later(
    kind, loss, files, tmp_path, monkeypatch
):
    """Before and after are then of the same rows, before of the untrained model."""
    drawn = []
    monkeypatch.setattr("fastsim.training.plots.draw", lambda *given: drawn.append(given[2:4]))
    file, held = files(kind)
    asked = options(tmp_path, file, loss=loss, max_steps=2, keep_checkpoints=True)
    train(asked)
    asked.resume, asked.max_steps, asked.eval = True, 3, held
    train(asked)
    untrained = prepare(asked).sample()
    (_, (before, after)) = drawn
    assert {name: before[name] for name in untrained} == untrained
    assert after["heat"] != before["heat"]
    if kind == "scored pairs":
        assert after["gold"] == before["gold"]
        assert len(after["scores"]) == len(before["scores"])


def test_losses_and_metrics_of_the_batches_go_on_after_a_break(files, tmp_path):
    """They are over the steps since the last that were logged, those before the break with them."""
    file, _ = files("tuples")
    more = {"loss": "info_nce", "logging_steps": 3, "max_steps": 6, "report_to": "none"}
    whole = train(options(tmp_path, file, **more))
    asked = options(tmp_path, file, output=str(tmp_path / "cut"), **more)
    stopped(asked, 5)
    resumed = train(asked)
    histories = [
        [
            {name: entry[name] for name in entry if name == "loss" or name.startswith("batch_")}
            for entry in history
        ]
        for history in (whole["history"], resumed["history"])
    ]
    assert histories[0] == histories[1]
    assert [bool(entry) for entry in histories[0]] == [True] * 3 + [False]  # the last: the run's
    # It is over all steps: the sum before the break follows from means over 1 and 2 of them.
    one, two = (found["history"][-1]["train_loss"] for found in (whole, resumed))
    assert abs(one - two) <= 6 * torch.finfo(torch.float32).eps * one


def test_the_clock_writes_checkpoints(files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=3, keep_checkpoints=True)
    asked.checkpoint_minutes = 1e-9
    train(asked)
    names = {path.name for path in (tmp_path / "out-checkpoints").iterdir()}
    assert {"checkpoint-2", "checkpoint-3"} <= names


def test_nan_ends_a_run_and_the_old_model_stays(files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=2)
    train(asked)
    texts = models.texts(10)
    before = Encoder.from_pretrained(asked.output).encode(texts)
    asked.max_steps, asked.learning_rate, asked.logging_steps = 5, 1e30, 100
    with pytest.raises(FloatingPointError, match="became NaN or infinite by step"):
        train(asked)
    # One step leaves a loss that is fine and weights that are not.
    asked.max_steps, asked.logging_steps = 1, 1
    asked.learning_rate, asked.warmup = 1e39, 0.0
    with pytest.raises(FloatingPointError, match=r"weights .* became NaN or infinite by step 1"):
        train(asked)
    assert torch.equal(Encoder.from_pretrained(asked.output).encode(texts), before)


# In one process: importing what training needs takes longer than the runs.
FULL = """
import os, shlex, subprocess, sys
from click.testing import CliRunner
from fastsim.cli.main import main
def run(*more):
    done = CliRunner().invoke(main, [*shlex.split(sys.argv[1]), *more])
    print(done.output, "code", done.exit_code)
def sums():
    subprocess.run("sha256sum disk/out/*.safetensors", shell=True)
run("--checkpoints", "elsewhere")
sums()
sys.stdout.flush()
subprocess.run("head -c 100000 /dev/zero >disk/hole; cat /dev/zero >disk/filler; rm disk/hole",
               shell=True)
run("--checkpoints", "disk/inside", "--overwrite")
sys.stdout.flush()
sums()
"""


def test_a_loss_that_was_not_finite_once_is_remembered():
    """Until the next look, although those after it are finite: looking waits for the device."""
    found = iter(torch.tensor([1.0, float("inf"), 2.0]))
    trainer = SimpleNamespace(_step=lambda *_: next(found), _not_finite=None)
    trainer.state = SimpleNamespace(global_step=3)
    Trainer.training_step(trainer, None, None)
    Trainer.check_finite(trainer, weights=False)
    for _ in range(2):
        Trainer.training_step(trainer, None, None)
    with pytest.raises(FloatingPointError, match="the loss became NaN or infinite by step 3"):
        Trainer.check_finite(trainer, weights=False)


def test_a_full_disk_keeps_the_old_model(files, tmp_path):
    from tests.test_folders import can_mount

    if not can_mount():
        pytest.skip("wants the right to mount file systems")
    file, _ = files("tuples")
    (tmp_path / "disk").mkdir()
    arguments = f"train --model {models.tiny_bert()} --train {file} --loss info_nce --cpu"
    arguments += " --output disk/out --max-steps 2 --no-progress"
    (tmp_path / "full.py").write_text(FULL)
    script = f"cd {tmp_path} && mount -t tmpfs -o size=3m none disk && "
    script += f"{sys.executable} full.py {shlex.quote(arguments)}"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment
    )
    assert "Error: disk full: cannot write" in done.stdout, done.stdout + done.stderr
    assert "disk/inside/checkpoint-2" in done.stdout
    assert "code 0" in done.stdout
    assert "code 5" in done.stdout
    sums = [line for line in done.stdout.splitlines() if "safetensors" in line]
    assert len(sums) == 2
    assert len(set(sums)) == 1


def test_options_out_of_range_are_refused(tmp_path):
    for name, value in (
        ("learning_rate", float("inf")),
        ("learning_rate", float("nan")),
        ("epochs", float("nan")),
        ("warmup", -1.0),
        ("max_steps", 0),
        ("max_steps", -3),
        ("checkpoint_minutes", 0.0),
        ("seed", -1),
        ("seed", 2**32),
        ("architecture", "crossencoder"),
        ("precision", "float16"),
        ("weights", "bfloat16"),
    ):
        with pytest.raises(ValueError, match=f"{name}: wanted .*, got {value!r}"):
            Options(train="a", output="b", loss="cosent", **{name: value})
    with pytest.raises(
        ValueError, match=r"checkpoint_steps: wanted a multiple of eval_steps \(2\)"
    ):
        Options(train="a", output="b", loss="cosent", eval="c", eval_steps=2, checkpoint_steps=3)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="precision: wanted bf16 or fp32 on a CPU, got fp16"):
            prepare(Options(train="a", output="b", loss="cosent", precision="fp16"))


def test_what_loads_a_model_may_change(files, tmp_path):
    """Its weights are the same: a folder may have become one that is trusted."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=2)
    whole = train(asked)
    asked.output = str(tmp_path / "cut")
    stopped(asked, 1)
    asked.trust_remote_code = asked.allow_pickle = True
    assert losses(train(asked)) == losses(whole)


def test_what_cannot_be_resumed_is_refused_before_anything_is_read(files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", resume=True)
    said = []
    with pytest.raises(OutputError, match="resume: no complete checkpoint in"):
        train(asked, said.append)
    asked.resume = False
    stopped(asked, 1)
    asked.batch_size = 4
    with pytest.raises(ValueError, match="resume: batch_size: wanted 8, as in this run, got 4"):
        train(asked, said.append)
    assert said == []


def test_what_is_about_evaluation_may_come_with_its_data(files, tmp_path):
    file, held = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=2, keep_checkpoints=True)
    train(asked)
    asked.resume, asked.max_steps, asked.eval_steps = True, 4, 1
    with pytest.raises(ValueError, match=r"eval_steps: needs evaluation data \(--eval\)"):
        train(asked)
    asked.eval, asked.best_metric, asked.early_stopping = held, "mrr@10", 5
    result = train(asked)
    assert result["metric"] == "mrr@10"
    steps = [entry["step"] for entry in result["history"] if "eval_mrr@10" in entry]
    assert steps == [3, 4]
    # Now the run has them: they stay as they are.
    asked.max_steps, asked.early_stopping = 5, 6
    with pytest.raises(ValueError, match="resume: early_stopping: wanted 5, as in this run, got 6"):
        train(asked)
    asked.early_stopping = None
    with pytest.raises(ValueError, match="early_stopping: wanted 5, as in this run, got none"):
        train(asked)
    asked.early_stopping, asked.eval_columns = 5, "anchor,positive"
    with pytest.raises(ValueError, match="eval_columns: wanted none, as in this run, got 'anchor"):
        train(asked)
    asked.eval_columns, asked.lora = None, 16
    with pytest.raises(ValueError, match="lora: wanted none, as in this run, got 16"):
        train(asked)

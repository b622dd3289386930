"""Ends of a run before its time: what signals do, and when the clock saves."""

import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training import stopping, trainer
from fastsim.training.run import train
from fastsim.training.stopping import Watch
from tests.training.runs import options, stopped


def test_a_second_ctrl_c_ends_at_once():
    """The first, or a SIGTERM, waits for the end of the step."""
    watch = Watch(10)
    with watch.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert watch.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    watch = Watch(10)
    with watch.listening():
        signal.raise_signal(signal.SIGINT)
        assert watch.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_clock_counts_from_the_last_checkpoint(monkeypatch):
    """Steps of 4 minutes, a checkpoint after more than 10; one comes after the fourth anyway."""
    now = 1000.0
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    watch, saved = Watch(10), []
    state = SimpleNamespace(max_steps=99, epoch=0.5, compute_steps=lambda *_: None)
    args = SimpleNamespace(save_strategy="steps")
    watch.on_train_begin(args, state, None)
    for step in range(1, 13):
        now += 240
        state.global_step = step
        control = SimpleNamespace(should_save=step == 4, should_training_stop=False)
        watch.on_step_end(args, state, control)
        assert not control.should_training_stop
        if control.should_save:
            saved.append(step)
            watch.on_save(args, state, control)
    assert saved == [3, 4, 7, 10]


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
@pytest.mark.parametrize("strategy", ["epoch", "steps"])
@pytest.mark.parametrize(("epoch", "step"), [(1.5, 3), (2.0, 4), (2.5, 9)])
def test_what_an_epochs_end_saves_is_left_to_it(number, strategy, epoch, step, monkeypatch):
    """It has the metrics then; a stop within an epoch, which ends it too, has none."""
    watch = Watch(1e-9)
    watch.signal, watch._saved = number, 0.0
    args = SimpleNamespace(save_strategy=strategy)
    state = SimpleNamespace(global_step=step, max_steps=9, epoch=epoch)
    control = SimpleNamespace(should_save=False, should_evaluate=False)
    watch.on_step_end(args, state, control)
    ends = (epoch, step) != (1.5, 3)
    assert control.should_save == (strategy == "steps" or not ends)
    control.should_save = control.should_evaluate = True
    watch.on_epoch_end(args, state, control)
    assert control.should_save == control.should_evaluate == (ends or not number)


@pytest.mark.parametrize("step", [15, 20])
def test_a_run_that_a_signal_ended_has_the_metrics_of_the_unbroken_one(
    step, files, tmp_path, monkeypatch
):
    """By default they come with the epochs, of 15 steps: at the end of one, and within one."""
    file, held = files("scored pairs")
    more = {"eval": held, "epochs": 3, "early_stopping": 2, "keep_checkpoints": True}
    more |= {"learning_rate": 1e-2, "warmup": 0.0}
    whole = train(options(tmp_path, file, **more))
    sealed, seal = [], trainer.seal
    monkeypatch.setattr(trainer, "seal", lambda path: sealed.append(path.name) or seal(path))
    asked = options(tmp_path, file, output=str(tmp_path / "cut"), **more)
    stopped(asked, step)
    assert sealed == ["checkpoint-15", "checkpoint-20"][: 1 + (step == 20)]
    resumed = train(asked)
    found, wanted = (
        {entry["step"]: entry for entry in run["history"] if "eval_spearman_cosine" in entry}
        for run in (resumed, whole)
    )
    assert found == wanted
    assert wanted.keys() >= {15, 30}
    assert len(sealed) == len(set(sealed))
    assert (resumed["steps"], resumed["after"]) == (whole["steps"], whole["after"])

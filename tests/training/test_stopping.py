"""Ends of a run before its time: what signals do, and when the clock saves."""

import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
from fastsim.training import stopping
from fastsim.training.stopping import Watch


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
    state = SimpleNamespace(max_steps=12, compute_steps=lambda *_: None)
    watch.on_train_begin(None, state, None)
    for step in range(1, 13):
        now += 240
        control = SimpleNamespace(should_save=step == 4, should_training_stop=False)
        watch.on_step_end(None, state, control)
        assert not control.should_training_stop
        if control.should_save:
            saved.append(step)
            watch.on_save(None, state, control)
    assert saved == [3, 4, 7, 10]

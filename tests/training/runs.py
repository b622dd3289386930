"""Training runs of a tiny BERT: their data and options."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.training import demo
from fastsim.training.run import Options, train
from fastsim.training.stopping import Watch
from tests import models

KEPT, HELD = demo.situations()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(kind, situations):
    """The demo's situations in one of the formats."""
    found = []
    for number, (one, same, other, too) in enumerate(situations):
        if kind == "tuples":
            found += [{"anchor": one, "positive": same}, {"anchor": other, "positive": too}]
        elif kind == "triplets":
            found.append({"anchor": one, "positive": same, "negative": other})
        elif kind == "labelled pairs":
            found.append({"sentence1": one, "sentence2": same, "label": "same"})
            found.append({"sentence1": one, "sentence2": other, "label": "opposite"})
        elif kind == "binary":
            found.append({"sentence1": one, "sentence2": same, "label": 1})
            found.append({"sentence1": one, "sentence2": other, "label": 0})
        else:
            found += [{"text": text, "label": 2 * number} for text in (one, same)]
            found += [{"text": text, "label": 2 * number + 1} for text in (other, too)]
    return found


def options(tmp_path, file, **changes):
    settings = {
        "model": str(models.tiny_bert()),
        "train": file,
        "loss": "cosent",
        "output": str(tmp_path / "out"),
        "batch_size": 8,
        "learning_rate": 1e-3,
        "max_length": 32,
        "logging_steps": 1,
        "progress": False,
        "cpu": True,
    }
    return Options(**settings | changes)


def losses(result):
    return [entry["loss"] for entry in result["history"] if "loss" in entry]


def stop_after(monkeypatch, step):
    """The next run ends as after a signal in that step."""
    end = Watch.on_step_end

    def told(self, args, state, control, **more):
        if state.global_step == step:
            self.signal = 15
        end(self, args, state, control, **more)

    monkeypatch.setattr(Watch, "on_step_end", told)


def stopped(asked, step):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(RuntimeError, match=f"ended the run after step {step} of"):
            train(asked)
    asked.resume = True

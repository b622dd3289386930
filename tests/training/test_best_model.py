"""Metrics of a run, its best model and how long it waits for a better one, also after a break."""

import itertools
import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from safetensors.torch import load_file

from fastsim.encoders.encoder import Encoder
from fastsim.training import demo
from fastsim.training.evaluation import evaluate_encoder
from fastsim.training.prepare import Task
from fastsim.training.run import train
from tests import models
from tests.training.runs import KEPT, losses, options, stopped


def test_the_evaluation_data_of_a_run_stay(files, tmp_path):
    """Metrics before and after would be those of two data sets."""
    file, held = files("scored pairs")
    asked = options(tmp_path, file, max_steps=2, keep_checkpoints=True, eval=held)
    train(asked)
    other = demo.write_pairs(KEPT[12:18], tmp_path / "other.jsonl")
    asked.resume, asked.max_steps = True, 3
    for evaluated, got in ((other, "data of other content"), (None, "none")):
        asked.eval = evaluated
        with pytest.raises(ValueError, match=rf"eval_data: wanted .* \(--eval\), got {got}"):
            train(asked)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(held, moved)
    asked.eval = str(moved)
    assert train(asked)["steps"] == 3


@pytest.fixture
def best_first(files, tmp_path):
    """(options of a run whose best model is its first, that model's metrics)."""
    file, held = files("scored pairs")
    asked = options(tmp_path, file, max_steps=4, eval=held, eval_steps=1, learning_rate=0.3)
    asked.keep_checkpoints, asked.warmup = True, 0.0
    asked.best_metric = "spearman_cosine"
    return asked


def evaluated(result):
    return [entry["eval_spearman_cosine"] for entry in result["history"] if "eval_loss" not in entry
            and "eval_spearman_cosine" in entry]  # fmt: skip


@pytest.mark.parametrize("best", [3, 4])
def test_a_best_model_between_two_checkpoints_is_kept(best, best_first, tmp_path, monkeypatch):
    """Its metric is what later models are compared with: unsaved, no model would be the best."""
    calls, measure = itertools.count(), Task.evaluate

    def told(self):
        return measure(self) | {"spearman_cosine": 0.9 if next(calls) == best else 0.1}

    monkeypatch.setattr(Task, "evaluate", told)
    asked = best_first
    asked.checkpoint_steps, asked.max_steps = 2, 8
    train(asked)
    kept = tmp_path / "out-checkpoints"
    assert {path.name for path in kept.glob("checkpoint-*")} == {
        f"checkpoint-{best}",
        "checkpoint-8",
    }
    saved, last, model = (
        load_file(folder / "model.safetensors")
        for folder in (kept / f"checkpoint-{best}", kept / "checkpoint-8", tmp_path / "out")
    )
    name = next(name for name in model if "word_embeddings" in name)
    (own,) = [key for key in saved if key.endswith(name)]
    assert torch.equal(model[name], saved[own])
    assert not torch.equal(model[name], last[own])


def test_checkpoints_that_are_moved_keep_the_best_model(best_first, tmp_path):
    asked = best_first
    whole = train(asked)
    values = evaluated(whole)
    assert whole["after"]["spearman_cosine"] == max(values)
    (tmp_path / "out-checkpoints").rename(tmp_path / "moved-checkpoints")
    asked.output, asked.resume = str(tmp_path / "moved"), True
    assert train(asked)["after"] == whole["after"]
    asked.max_steps = 5
    longer = train(asked)
    assert longer["after"]["spearman_cosine"] == max(evaluated(longer))
    assert evaluated(longer)[:4] == values


def test_a_best_model_that_is_missing_is_told(best_first, tmp_path):
    asked, said = best_first, []
    whole = train(asked)
    values = evaluated(whole)
    best = values.index(max(values)) + 1
    last = tmp_path / f"out-checkpoints/checkpoint-{len(values)}"
    state = json.loads((last / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{best}")
    if best == len(values):
        pytest.skip("the last model is the best")
    shutil.rmtree(tmp_path / f"out-checkpoints/checkpoint-{best}")
    asked.resume, asked.max_steps = True, 6
    longer = train(asked, said.append)
    assert f"checkpoint-{best}, the best model so far, cannot be used: it is missing" in said
    assert longer["after"]["spearman_cosine"] == max(evaluated(longer)[len(values) :])


def test_early_stopping_goes_on_waiting(files, tmp_path):
    """It has waited as long as in a run without a break, and a run that it ended stays ended."""
    file, held = files("scored pairs")
    more = {"eval": held, "eval_steps": 1, "early_stopping": 3, "max_steps": 12, "warmup": 0.0}
    more |= {"learning_rate": 0.3, "keep_checkpoints": True, "schedule": "constant"}
    whole = train(options(tmp_path, file, **more))
    assert 4 <= whole["steps"] < 12
    asked = options(tmp_path, file, output=str(tmp_path / "cut"), **more)
    stopped(asked, whole["steps"] - 1)
    assert train(asked)["steps"] == whole["steps"]
    assert train(asked)["steps"] == whole["steps"]
    one, two = (Encoder.from_pretrained(tmp_path / name) for name in ("out", "cut"))
    texts = models.texts(5)
    assert torch.equal(one.encode(texts), two.encode(texts))


def test_a_logged_loss_is_the_mean_since_the_last(files, tmp_path):
    file, _ = files("tuples")
    more = {"loss": "info_nce", "max_steps": 7, "logging_steps": 3, "keep_checkpoints": True}
    whole = train(options(tmp_path, file, **more))
    asked = options(tmp_path, file, output=str(tmp_path / "cut"), **more)
    stopped(asked, 5)
    assert losses(train(asked)) == losses(whole)


def test_data_without_two_scores_has_no_metric(files, tmp_path):
    from fastsim.training.data import read_data

    _, held = files("scored pairs")
    data, layout = read_data(held)
    encoder = Encoder.from_pretrained(models.tiny_bert())
    for rows in (
        [0],
        [row for row, score in enumerate(data["score"]) if score == data["score"][0]],
    ):
        with pytest.raises(ValueError, match="data: wanted at least two different scores"):
            evaluate_encoder(encoder, data.select(rows), layout)
    same = tmp_path / "same.csv"
    same.write_text("sentence1,sentence2,score\na,b,0.5\nc,d,0.5\n")
    with pytest.raises(ValueError, match=r"eval: wanted at least two .*, got 0\.5 in every row"):
        train(options(tmp_path, held, eval=str(same)), dry_run=True)


def test_the_best_model_is_chosen_by_its_own_similarity(files, tmp_path, monkeypatch):
    """As is the metric that is told, and the end by early stopping."""
    calls, measure = itertools.count(), Task.evaluate
    values = [0.1, 0.8, 0.3, 0.2, 0.1, 0.1]  # by dot products; by cosines it gets ever better

    def told(self):
        number = next(calls)
        made_up = {"triplet_accuracy_dot": values[number], "triplet_accuracy_cosine": number / 9}
        return measure(self) | made_up

    monkeypatch.setattr(Task, "evaluate", told)
    file, held = files("triplets")
    asked = options(tmp_path, file, loss="info_nce", eval=held, eval_steps=1, max_steps=5)
    asked.loss_options, asked.early_stopping = {"similarity": "dot"}, 2
    asked.keep_checkpoints, said = True, []
    result = train(asked, said.append)
    assert result["metric"] == "triplet_accuracy_dot"
    assert "before   triplet_accuracy_dot 0.1000" in said
    assert result["steps"] == 3  # two after the best
    kept = tmp_path / "out-checkpoints"
    assert {path.name for path in kept.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}

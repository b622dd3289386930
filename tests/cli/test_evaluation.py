"""Evaluation on the command line: the columns of its data, the length at which texts are cut."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.encoders.cross_encoder import CrossEncoder
from fastsim.encoders.encoder import Encoder
from fastsim.training import demo
from fastsim.training.prepare import prepare
from tests import models
from tests.cli.test_cli import run, train
from tests.training.runs import options

_, HELD = demo.situations()


@pytest.fixture
def both(tmp_path):
    """A file of which other columns are pairs with a score, and anchors with their positives."""
    rows = [
        {"a": one, "b": same, "x": other, "y": too, "z": number / 7}
        for number, (one, same, other, too) in enumerate(HELD[:8])
    ]
    path = tmp_path / "both.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


TRAINED, SCORED = "anchor=a,positive=b", "sentence1=x,sentence2=y,score=z"


@pytest.mark.parametrize(
    ("given", "metric"),
    [((), "ndcg@10"), (("--eval-columns", SCORED), "spearman_cosine")],
)
def test_evaluation_data_have_columns_of_their_own(given, metric, both, tmp_path):
    """By default those of the training."""
    file, _ = both
    out = tmp_path / "out"
    command = ("--eval", file, "--columns", TRAINED, *given, "--max-steps", 1)
    result = train(file, out, *command, loss="info_nce")
    assert result.exit_code == 0, result.output
    about = json.loads((out / "fastsim_training.json").read_text())
    assert (about["metric"], about["columns"]) == (metric, ["anchor", "positive"])
    assert metric in about["after"]


def test_the_columns_that_are_named_are_evaluated(both, tmp_path):
    file, rows = both
    asked = options(tmp_path, str(file), loss="info_nce", columns=TRAINED, eval=str(file))
    asked.eval_columns = SCORED
    task = prepare(asked)
    assert [row["anchor"] for row in task.train] == [row["a"] for row in rows]
    found = [(row["sentence1"], row["sentence2"], row["score"]) for row in task.eval]
    assert found == [(row["x"], row["y"], row["z"]) for row in rows]


@pytest.fixture
def lengths(monkeypatch):
    """The widths of the batches that models are given, in tokens."""
    found = []
    for kind in (Encoder, CrossEncoder):

        def noted(self, features, forward=kind.forward):
            found.append(features["input_ids"].shape[1])
            return forward(self, features)

        monkeypatch.setattr(kind, "forward", noted)
    return found


@pytest.mark.parametrize("kind", ["data", "retrieval", "cross-encoder"])
def test_texts_are_cut_at_the_length_asked(kind, lengths, tmp_path):
    model = models.tiny_bert()
    if kind == "cross-encoder":
        model = tmp_path / "cross"
        CrossEncoder.from_pretrained(models.tiny_bert()).save_pretrained(model)
    if kind == "retrieval":
        for name, part in (("corpus", 1), ("queries", 0)):
            rows = [{"_id": f"{n}", "text": row[part]} for n, row in enumerate(HELD[:8])]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "qrels").mkdir()
        (tmp_path / "qrels/test.tsv").write_text("0\t1\t1\n1\t0\t1\n")
        given = ("--retrieval", tmp_path)
    else:
        given = ("--data", demo.write_pairs(HELD[:8], tmp_path / "held.jsonl"))
    command = ("evaluate", "--model", model, *given, "--cpu", "--json")
    limit = 7  # below the length of every text here
    found = []
    for more in ((), ("--max-length", limit)):
        lengths.clear()
        result = run(*command, *more)
        assert result.exit_code == 0, result.output
        found.append(set(lengths))
    assert min(found[0]) > limit
    assert found[1] == {limit}

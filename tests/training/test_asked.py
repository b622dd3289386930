"""What a run is asked is what it does: rates, prompts, seeds, and what it leaves as it was."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from safetensors.torch import load_file

from fastsim.encoders.encoder import Encoder
from fastsim.scores import cosine_similarity, paired_cosine_similarity
from fastsim.training.collator import Collator
from fastsim.training.data import read_data
from fastsim.training.evaluation import evaluate_encoder
from fastsim.training.load import evaluate_model, load_encoder
from fastsim.training.prepare import HEAT_MAP_TEXTS, prepare
from fastsim.training.prompts import name_parts
from fastsim.training.run import OutputError, train
from tests import models
from tests.training.runs import losses, options, stopped, write


def weights(folder):
    return load_file(folder / "model.safetensors")


def rows_of(file):
    with open(file) as handle:
        return [json.loads(line) for line in handle]


def assert_same(one, two):
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_prompts_are_trained_with(files, tmp_path):
    """As texts that begin with them are."""
    file, held = files("tuples")
    prompts = {"query": "the question : ", "positive": "is the "}
    more = {"loss": "info_nce", "max_steps": 3}
    told = train(options(tmp_path, file, eval=held, prompts=prompts, **more))
    before = {"anchor": prompts["query"], "positive": prompts["positive"]}
    written = [
        write(
            tmp_path / f"prompted-{number}.jsonl",
            [{name: before[name] + row[name] for name in row} for row in rows_of(path)],
        )
        for number, path in enumerate((file, held))
    ]
    asked = options(tmp_path, written[0], output=str(tmp_path / "written"), **more)
    asked.eval = written[1]
    assert train(asked)["after"] == told["after"]
    assert_same(weights(tmp_path / "out"), weights(tmp_path / "written"))
    train(options(tmp_path, file, output=str(tmp_path / "without"), **more))
    without, out = (weights(tmp_path / name) for name in ("without", "out"))
    assert any(not torch.equal(without[name], out[name]) for name in out)


@pytest.mark.parametrize(
    ("kind", "prompts", "unused"),
    [
        ("scored pairs", {"sentence1": "a", "query": "b"}, "sentence1, sentence2, got 'query'"),
        ("labelled texts", {"document": "a"}, "text, got 'document'"),
        ("tuples", {"document": "a", "passage": "b"}, "anchor, positive, got 'passage'"),
        ("tuples", {"anchor": "a", "query": "b"}, "anchor, positive, got 'query'"),
    ],
)
def test_a_prompt_that_no_text_gets_is_refused(kind, prompts, unused, files, tmp_path):
    file, held = files(kind)
    loss = {"scored pairs": "cosent", "labelled texts": "sup_con", "tuples": "info_nce"}[kind]
    asked = options(tmp_path, file, loss=loss, eval=held, prompts=prompts)
    with pytest.raises(ValueError, match=f"prompt: wanted one that applies to {unused}"):
        train(asked, dry_run=True)
    dataset, layout = read_data(held)
    with pytest.raises(ValueError, match=f"prompt: wanted one that applies to {unused}"):
        evaluate_model(asked.model, dataset, layout, prompts=prompts, cpu=True)


def test_a_prompt_of_the_evaluation_alone_is_taken(files, tmp_path):
    file, _ = files("scored pairs")
    pairs = write(tmp_path / "pairs.jsonl", [{"anchor": "a", "positive": "b"}] * 2)
    asked = options(tmp_path, file, eval=pairs, prompts={"query": "q: "})
    train(asked, dry_run=True)


def test_prompts_of_columns_are_those_of_a_search(files, tmp_path):
    """Queries are what anchors are, documents what positives are."""
    file, _ = files("tuples")
    prompts = {"anchor": "the question : ", "positive": "is the "}
    train(options(tmp_path, file, loss="info_nce", prompts=prompts, max_steps=1))
    encoder, texts = load_encoder(tmp_path / "out", cpu=True), models.texts(5)
    for encode, prompt in (
        (encoder.encode_query, prompts["anchor"]),
        (encoder.encode_document, prompts["positive"]),
    ):
        assert torch.equal(encode(texts), encoder.encode([prompt + text for text in texts]))


@pytest.mark.parametrize(
    ("known", "given", "wanted"),
    [
        ({}, {"positive": "p"}, {"document": "p"}),
        (
            {"query": "", "passage": ""},
            {"anchor": "a", "positive": "p"},
            {"query": "a", "passage": "p"},
        ),
        (
            {"query": "q", "corpus": "c"},
            {"anchor": "a", "positive": "p"},
            {"query": "q", "corpus": "c"},
        ),
        ({}, {"positive": "p", "document": ""}, {"document": ""}),
        ({"anchor": "a"}, {}, {"query": "a"}),
        ({}, {"text": "t"}, {}),
    ],
)
def test_a_part_of_a_search_keeps_its_own_prompt(known, given, wanted):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.prompts = known | given
    name_parts(encoder, given)
    assert encoder.prompts == known | given | wanted


def test_pictures_are_drawn_with_the_prompts_of_columns(files, tmp_path):
    file, _ = files("scored pairs")
    prompts = {"sentence1": "the question : ", "sentence2": "is the "}
    task = prepare(options(tmp_path, file, prompts=prompts))
    found = task.sample()
    rows = task.train[:HEAT_MAP_TEXTS]
    first, second = (
        task.encoder.encode([prompts[name] + text for text in rows[name]]) for name in prompts
    )
    assert found["heat"] == cosine_similarity(first, second).tolist()
    assert found["scores"][:HEAT_MAP_TEXTS] == pytest.approx(
        paired_cosine_similarity(first, second).tolist(), abs=1e-5
    )


def test_metrics_are_of_the_widest_width_that_is_trained(files, tmp_path):
    """What lies beyond is not trained; the model keeps it."""
    file, held = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", eval=held, matryoshka=(2, 4), max_steps=2)
    result = train(asked)
    data, layout = read_data(held)
    encoder = Encoder.from_pretrained(asked.output, max_length=32)
    assert encoder.truncate_dim is None
    found = evaluate_encoder(encoder, data, layout, width=4)
    assert result["after"] == pytest.approx(found, abs=1e-6)
    assert result["after"] != pytest.approx(evaluate_encoder(encoder, data, layout), abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "loss", "more", "reason"),
    [
        ("labelled texts", "sup_con", {"loss_options": {"temperature": -1}},
         "temperature: wanted a positive finite number, got -1"),
        ("tuples", "info_nce", {"loss_options": {"temperature": -1}, "learn": ("temperature",)},
         "temperature: wanted a positive finite number, got -1"),
        ("tuples", "info_nce", {"loss_options": {"exclude_above": "a"}},
         "exclude_above: wanted a number, got str"),
        ("tuples", "full_triplet", {"loss_options": {"reduction": "none"}},
         "reduction: wanted one number for a batch .*, got 'none'"),
        ("triplets", "triplet_margin", {"loss_options": {"reduction": "none"}},
         "reduction: wanted one number for a batch .*, got 'none'"),
        ("scored pairs", "angle", {"matryoshka": (8, 7)}, "wanted an even width .*, got 7"),
    ],
)  # fmt: skip
def test_what_the_loss_refuses_is_refused_before_anything_is_written(
    kind, loss, more, reason, files, tmp_path
):
    file, _ = files(kind)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=f"{loss}: .*{reason}"):
            train(options(tmp_path, file, loss=loss, **more), dry_run=dry_run)
        assert not (tmp_path / "out-checkpoints").exists()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_the_folder_names_the_similarity_of_the_loss(similarity, files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=1)
    asked.loss_options = {"similarity": similarity} if similarity == "dot" else None
    train(asked)
    assert Encoder.from_pretrained(asked.output).similarity == similarity


def test_scores_are_mapped_from_their_range(files, tmp_path):
    file, _ = files("scored pairs")
    rows = rows_of(file)
    for name, score, score_range in (
        ("one", lambda row: 1 + 4 * row["score"], (1, 5)),
        ("two", lambda row: ((1 + 4 * row["score"]) - 1) / 4, None),
    ):
        changed = [row | {"score": score(row)} for row in rows]
        mapped = write(tmp_path / f"{name}.jsonl", changed)
        asked = options(tmp_path, mapped, loss="cosine_regression", max_steps=2)
        asked.score_range, asked.output = score_range, str(tmp_path / name)
        train(asked)
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    asked.score_range = (0, 0.5)
    with pytest.raises(ValueError, match=r"score: wanted scores in --score-range 0,0\.5, got "):
        train(asked, dry_run=True)


@pytest.mark.parametrize("own", [None, 0.1])
def test_the_loss_learns_at_its_own_rate_and_does_not_decay(own, files, tmp_path):
    """The first step of Adam is as long as the rate, but for its small epsilon."""
    file, _ = files("tuples")
    asked = options(
        tmp_path, file, loss="info_nce", learn=("temperature",), max_steps=1, schedule="constant"
    )
    asked.weight_decay, asked.learning_rate, asked.loss_learning_rate = 0.9, 1e-3, own
    start = torch.nn.Parameter(torch.tensor(0.05))
    result = train(asked)
    step = abs(math.log(result["loss_values"]["temperature"]) - start.log().item())
    rate = asked.learning_rate if own is None else own
    rounding = 4 * torch.finfo(torch.float32).eps * abs(start.log().item())
    assert rate / 2 < step <= rate + rounding


def test_a_classifier_learns_at_a_rate_of_its_own(files, tmp_path):
    file, _ = files("labelled pairs")
    train(options(tmp_path, file, loss="classification", loss_learning_rate=0.1), dry_run=True)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_weights_decay_as_asked(decay, files, tmp_path):
    """The embedding of a token that no text has changes by the decay alone."""
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", max_steps=1, schedule="constant")
    asked.weight_decay, asked.learning_rate = decay, 0.1
    train(asked)
    name, mask = "embeddings.word_embeddings.weight", 4
    before, after = (
        weights(folder)[name][mask] for folder in (models.tiny_bert(), tmp_path / "out")
    )
    expected = before * (1 - asked.learning_rate * decay)
    bound = 2 * torch.finfo(torch.float32).eps * before.abs().max()
    assert (after - expected).abs().max() <= bound


@pytest.mark.parametrize(("kind", "loss"), [("scored pairs", "cosent"), ("tuples", "info_nce"),
                                            ("tuples", "decoupled_contrastive"),
                                            ("labelled texts", "sup_con")])  # fmt: skip
def test_the_order_of_rows_is_of_the_seed_and_the_epoch(
    kind,
    loss,
    files,
    tmp_path,
    monkeypatch,
):
    file, _ = files(kind)
    count = len(rows_of(file))
    seen, call = [], Collator.__call__
    first = {"scored pairs": "sentence2", "tuples": "anchor", "labelled texts": "text"}[kind]
    monkeypatch.setattr(
        Collator,
        "__call__",
        lambda self, rows: seen.extend(row[first] for row in rows) or call(self, rows),
    )
    orders = []
    for seed in (0, 0, 1):
        seen.clear()
        train(options(tmp_path, file, loss=loss, epochs=2, seed=seed, overwrite=True))
        orders.append((seen[:count], seen[count:]))
    wanted = sorted(row[first] for row in rows_of(file))
    for epochs in orders:
        assert [sorted(epoch) for epoch in epochs] == [wanted] * 2
        assert epochs[0] != epochs[1]
    assert orders[0] == orders[1] != orders[2]


def test_micro_batches_that_accumulate_have_the_same_gradient(files, tmp_path):
    """Without dropout, of which each micro-batch would have its own."""
    shutil.copytree(models.tiny_bert(), tmp_path / "calm")
    config = tmp_path / "calm/config.json"
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps(json.loads(config.read_text()) | calm))
    file, _ = files("scored pairs")
    found = []
    for micro in (None, 3):
        asked = options(tmp_path, file, max_steps=1, accumulate=3, micro_batch_size=micro)
        asked.model, asked.output = str(tmp_path / "calm"), str(tmp_path / str(micro))
        result = train(asked)
        (norm,) = [entry["grad_norm"] for entry in result["history"] if "grad_norm" in entry]
        found.append((norm, *losses(result)))
    assert found[0] == pytest.approx(found[1], rel=math.sqrt(torch.finfo(torch.float32).eps))


def test_signals_are_handled_as_before_when_a_run_has_ended(files, tmp_path):
    file, _ = files("tuples")
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    asked = options(tmp_path, file, loss="info_nce", max_steps=2)
    stopped(asked, 1)
    assert [signal.getsignal(number) for number in numbers] == before
    train(asked)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("name", ["", "me/model/more", "me model"])
def test_a_name_that_the_hub_cannot_have_is_refused_before_the_training(name, files, tmp_path):
    file, _ = files("tuples")
    asked = options(tmp_path, file, loss="info_nce", push_to_hub=name)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="push_to_hub: "):
            train(asked, dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def test_the_hub_gets_the_model_and_no_file_of_the_users(files, tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    pushed = []

    class Hub:
        def create_repo(self, name, *, exist_ok):
            pushed.append(name)

        def upload_folder(self, *, repo_id, folder_path, allow_patterns=None):
            files = [file for file in folder_path.rglob("*") if file.is_file()]
            names = [str(file.relative_to(folder_path)) for file in files]
            pushed.append(set(filter_repo_objects(names, allow_patterns=allow_patterns)))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    file, _ = files("tuples")
    (tmp_path / "out/notes").mkdir(parents=True)
    (tmp_path / "out/notes/secret").write_text("mine")
    (tmp_path / "out/secret.safetensors").write_text("mine")
    train(options(tmp_path, file, loss="info_nce", max_steps=1, push_to_hub="me/model"))
    name, sent = pushed
    assert name == "me/model"
    assert {"model.safetensors", "modules.json", "1_Pooling/config.json", "README.md"} <= sent
    assert not [file for file in sent if "secret" in file]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_weights_are_held_and_saved_in_the_type_asked(kind, files, tmp_path):
    file, _ = files("tuples")
    train(options(tmp_path, file, loss="info_nce", max_steps=1, weights=kind))
    found = {value.dtype for value in weights(tmp_path / "out").values()}
    assert found == {{"fp32": torch.float32, "bf16": torch.bfloat16}[kind]}


def test_names_that_are_not_utf_8_cost_no_model(files, tmp_path):
    """One stands in the model's README; a model cannot be in a folder of such a name."""
    file, held = files("tuples")
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{name}.jsonl").write_bytes(Path(held).read_bytes())
    asked = options(tmp_path, file, loss="info_nce", max_steps=1, output=str(tmp_path / "caf"))
    asked.eval = str(tmp_path / f"{name}.jsonl")
    train(asked)
    card = (tmp_path / "caf/README.md").read_text(encoding="utf-8")
    assert "Measured on `caf?.jsonl`." in card
    written = json.loads((tmp_path / "caf/fastsim_training.json").read_text())
    assert written["options"]["eval"] == asked.eval
    for option in ("output", "checkpoints"):
        changed = options(tmp_path, file, loss="info_nce", **{option: str(tmp_path / name)})
        with pytest.raises(OutputError, match=f"^{option}: wanted a path in UTF-8, got "):
            train(changed)

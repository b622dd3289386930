"""The command line of training: options from a file, dry runs, prompts, LoRA, the model card."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import fastsim
from fastsim.encoders.encoder import Encoder
from fastsim.training import demo
from tests import models
from tests.cli.test_cli import one_line, run, train

KEPT, HELD = demo.situations()


def test_a_file_of_options_a_dry_run_and_the_run(tuples, tmp_path):
    pytest.importorskip("peft")
    config = tmp_path / "run.yaml"
    config.write_text(
        "max-steps: 50\nlora: 2\nmatryoshka: [8, 32]\ngradient-checkpointing: true\n"
        'prompt: {query: "the question : ", document: "is "}\n'
        "loss-option: {temperature: 0.1}\n"
    )
    out = tmp_path / "out"
    common = ("--config", config, "--max-steps", 2, "--eval", tuples)
    result = train(tuples, out, *common, "--dry-run", loss="info_nce")
    assert result.exit_code == 0, result.output
    assert not out.exists()
    assert "data     24 rows, tuples (anchor, positive)" in result.stderr
    assert "batches  3 of 8 rows; 2 steps" in result.stderr
    assert "loss     info_nce (temperature=0.1), backend" in result.stderr
    result = train(tuples, out, *common, "--progress", "--logging-steps", 1, loss="info_nce")
    assert result.exit_code == 0, result.output
    assert "before   ndcg@10 0." in result.stderr
    assert "step 2/2  loss " in result.stderr
    assert len(result.stdout.splitlines()) == 5  # three metrics, their head, where it is
    saved = json.loads((out / "fastsim_training.json").read_text())
    assert saved["options"]["matryoshka"] == [8, 32]
    assert saved["options"]["max_steps"] == 2  # the command line comes before the file
    card = (out / "README.md").read_text()
    assert "| ndcg@10 |" in card
    assert "encode_query" in card
    encoder = Encoder.from_pretrained(out)
    assert encoder.prompts == {"query": "the question : ", "document": "is "}
    before = Encoder.from_pretrained(models.tiny_bert())
    before.prompts = encoder.prompts
    texts = models.texts(4)
    assert (encoder.encode_query(texts) - before.encode_query(texts)).abs().max() > 0
    config.write_text("no-such-option: 1\n")
    result = train(tuples, out, "--config", config, loss="info_nce")
    assert "wanted options of fastsim train, got 'no-such-option'" in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("accumulate: 16.9", "'16.9' is not a valid integer"),
        ("lora: true", "lora: wanted a value other than true or false, got True"),
        ("resume: 0", "resume: wanted true or false, got 0"),
        ("epochs: 1\nepochs: 2", "wanted each name once, got 'epochs' twice"),
        ('{"epochs": 1, "epochs": 2}', "wanted each name once, got 'epochs' twice"),
        ("batch-size: 4\nbatch_size: 8", "wanted each option once, got 'batch_size' twice"),
        ("batch_size: 8\nbatch-size: 4", "wanted each option once, got 'batch-size' twice"),
        ("loss-option: {scale: 1, scale: 2}", "wanted each name once, got 'scale' twice"),
    ],
)
def test_values_of_a_file_of_options_are_checked(text, reason, tuples, tmp_path):
    config = tmp_path / ("run.json" if text.startswith("{") else "run.yaml")
    config.write_text(text)
    result = train(tuples, tmp_path / "out", "--config", config, loss="info_nce")
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_of_options_may_leave_some_empty(suffix, tuples, tmp_path):
    """Nothing is the default, or the empty prompt. Some editors write a byte order mark."""
    config = tmp_path / f"run.{suffix}"
    setting = {"epochs": None, "lora": None, "header": None, "prompt": {"query": None}}
    columns = {"anchor": "anchor", "positive": "positive"}
    config.write_text(json.dumps(setting | {"columns": columns}), encoding="utf-8-sig")
    result = train(tuples, tmp_path / "out", "--config", config, loss="info_nce")
    assert result.exit_code == 0, result.output
    assert Encoder.from_pretrained(tmp_path / "out").prompts == {"query": ""}
    options = json.loads((tmp_path / "out/fastsim_training.json").read_text())["options"]
    assert options["epochs"] == 1


def test_the_home_folder_in_a_file_of_options(tuples, tmp_path, monkeypatch):
    """A shell would write it out on the command line."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"train: [~/{tuples.name}]\neval: ~/{tuples.name}\noutput: ~/out\ncheckpoints: ~/kept\n"
        "loss: info_nce\nmax-steps: 1\nkeep-checkpoints: true\nprompt: {query: ~/q}\n"
    )
    result = run("train", "--config", config, "--model", models.tiny_bert(), "--cpu")
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "out/fastsim_training.json").read_text())["options"]
    assert saved["train"] == saved["eval"] == str(tuples)
    assert saved["prompts"] == {"query": "~/q"}  # no path
    assert (tmp_path / "kept/checkpoint-1").is_dir()


def test_prompts_are_of_texts_that_there_are(tuples, tmp_path):
    (tmp_path / "corpus.txt").write_text("one\n")
    common = ("--model", models.tiny_bert(), "--cpu", "--prompt", "querry=q: ")
    for command in (
        ("search", "--corpus", tmp_path / "corpus.txt", "--query", "one"),
        ("evaluate", "--data", tuples),
        ("mine", "--pairs", tuples, "--output", tmp_path / "mined"),
    ):
        one_line(run(*command, *common), 2, "prompt: wanted query, document", "got 'querry'")
        unused = (*common[:-1], "label=l: ")
        one_line(run(*command, *unused), 2, "prompt: wanted one that applies to", "got 'label'")


def test_a_name_is_given_one_value(tuples, tmp_path):
    """The last of several would win without a word."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one\n")
    prompts = ("--prompt", "query=a", "--prompt", "query=b")
    for command in (
        ("search", "--corpus", corpus, "--query", "one"),
        ("evaluate", "--data", tuples),
        ("mine", "--pairs", tuples, "--output", tmp_path / "mined.jsonl"),
    ):
        result = run(*command, "--model", models.tiny_bert(), "--cpu", *prompts)
        assert result.exit_code == 2
        assert "'--prompt': wanted one value for query, got 'a' and 'b'" in result.stderr
    twice = ("--loss-option", "margin=0", "--loss-option", "margin=0.5")
    result = train(tuples, tmp_path / "out", *twice, loss="info_nce")
    assert result.exit_code == 2
    assert "'--loss-option': wanted one value for margin, got 0 and 0.5" in result.stderr


def test_options_of_the_other_kind_of_evaluation_are_refused(tuples, tmp_path):
    """A split of a data set on the hub is in its name: --split would be left aside."""
    for given, option in (
        (("--data", tuples, "--split", "test"), "--split"),
        (("--retrieval", tmp_path, "--columns", "text"), "--columns"),
        (("--retrieval", tmp_path, "--format", "csv"), "--format"),
        (("--retrieval", tmp_path, "--delimiter", ";"), "--delimiter"),
        (("--retrieval", tmp_path, "--no-header"), "--header"),
    ):
        result = run("evaluate", "--model", models.tiny_bert(), "--cpu", *given)
        assert result.exit_code == 2
        assert f"{option}: cannot be combined with {given[0]}" in result.stderr


def test_options_that_would_be_left_aside_are_refused(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one\n")
    search = ("search", "--model", models.tiny_bert(), "--cpu", "--corpus", corpus, "--query", "a")
    result = run(*search, "--json", "--format", "text")
    assert result.exit_code == 2
    assert "--json: cannot be combined with --format text" in result.stderr
    answers = [run(*search, *how) for how in ((), ("--format", "text"), ("--json",))]
    answers.append(run(*search, "--json", "--format", "json"))
    assert [answer.exit_code for answer in answers] == [0] * 4
    assert answers[0].stdout == answers[1].stdout != answers[2].stdout == answers[3].stdout
    for given in (("--loss", "cosent"), ("--dtype", "float32"), ("--sizes", "8"), ("--quick",)):
        result = run("bench", "--from", corpus, *given)
        assert result.exit_code == 2
        assert f"{given[0]}: cannot be combined with --from" in result.stderr
    result = run("bench", "--from", corpus, "--no-progress", "--out", tmp_path / "out")
    one_line(result, 3, "from: wanted a result file")


def test_a_search_that_the_model_cannot_do_is_refused_before_the_work(tmp_path, monkeypatch):
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.similarity = "manhattan"
    encoder.save_pretrained(tmp_path / "model")
    corpus, index = tmp_path / "corpus.txt", tmp_path / "corpus.index"
    corpus.write_text("one\n")
    command = ("search", "--model", tmp_path / "model", "--corpus", corpus, "--query", "a")
    one_line(run(*command, "--index", index, "--cpu"), 4, "got similarity_fn_name 'manhattan'")
    assert not index.exists()


def test_json_has_no_nan(tmp_path):
    import torch

    encoder = Encoder.from_pretrained(models.tiny_bert())
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()  # all embeddings are alike: there is no correlation
    encoder.save_pretrained(tmp_path / "zero")
    data = demo.write_pairs(HELD[:4], tmp_path / "held.jsonl")
    result = run("evaluate", "--model", tmp_path / "zero", "--data", data, "--json", "--cpu")
    assert result.exit_code == 0, result.output

    def refuse(name):
        raise AssertionError(name)

    found = json.loads(result.stdout, parse_constant=refuse)
    assert found["spearman_cosine"] is None


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_retrieval_is_that_of_sentence_transformers(similarity, tmp_path):
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    from sentence_transformers import SentenceTransformer

    corpus = {f"d{i}": text for i, text in enumerate(text for row in HELD for text in row)}
    queries = {f"q{i}": row[0] for i, row in enumerate(KEPT[:12])}
    relevant = {f"q{i}": {f"d{4 * i}", f"d{4 * i + 1}", f"d{7 * i}"} for i in range(12)}
    for name, texts in (("corpus", corpus), ("queries", queries)):
        lines = [json.dumps({"_id": key, "text": text}) for key, text in texts.items()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "qrels").mkdir()
    lines = [f"{query}\t{d}\t1" for query, found in relevant.items() for d in sorted(found)]
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(lines))
    encoder = Encoder.from_pretrained(models.tiny_bert())
    encoder.similarity = similarity
    encoder.save_pretrained(tmp_path / "model")
    result = run(
        *("evaluate", "--model", tmp_path / "model", "--retrieval", tmp_path, "--json", "--cpu")
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    peer = evaluation.InformationRetrievalEvaluator(
        queries, corpus, relevant, precision_recall_at_k=[10, 100], show_progress_bar=False
    )
    theirs = peer(SentenceTransformer(str(tmp_path / "model"), device="cpu"))
    for name in ("ndcg@10", "mrr@10", "recall@10", "recall@100"):
        assert found[name] == pytest.approx(theirs[f"{similarity}_{name}"], abs=1e-6), name
    (tmp_path / "qrels/test.tsv").write_text("q0\td999\t1\n")
    result = run("evaluate", "--model", models.tiny_bert(), "--retrieval", tmp_path, "--cpu")
    one_line(result, 3, "line 1: 'd999' is not in corpus.jsonl")


def test_search_keeps_an_index(tmp_path, monkeypatch):
    corpus, index = tmp_path / "corpus.txt", tmp_path / "corpus.index"
    corpus.write_text("\n".join(models.texts(12)))
    encoded = []
    encode = Encoder.encode

    def counted(self, texts, **options):
        encoded.append(len(texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(Encoder, "encode", counted)
    command = ("search", "--model", models.tiny_bert(), "--corpus", corpus, "--cpu")
    command += ("--query", models.texts(12)[5], "--index", index, "--format", "json")
    first, second = run(*command), run(*command)
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    assert encoded == [12, 1, 1]
    corpus.write_text("\n".join(models.texts(13)))
    before = index.read_bytes()
    one_line(run(*command), 5, "is of other texts; --overwrite replaces it")
    assert (encoded[3:], index.read_bytes()) == ([], before)
    run(*command, "--overwrite")
    assert encoded[3:] == [13, 1]
    known = len(encoded)
    elsewhere = run(*command, "--index", tmp_path / "no/such.index")
    one_line(elsewhere, 5, "index: cannot write", "No such file")
    assert len(encoded) == known  # nothing was encoded in vain
    index.write_text("mine")
    one_line(run(*command, "--overwrite"), 2, "is not a fastsim index")
    assert index.read_text() == "mine"


def test_a_model_of_nan_is_refused(tmp_path):
    import torch

    encoder = Encoder.from_pretrained(models.tiny_bert())
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(torch.nan)
    encoder.save_pretrained(tmp_path / "nan")
    data = demo.write_pairs(HELD[:4], tmp_path / "held.jsonl")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(models.texts(5)))
    for command in (
        ("evaluate", "--data", data),
        ("search", "--corpus", corpus, "--query", "a"),
    ):
        result = run(*command, "--model", tmp_path / "nan", "--cpu")
        one_line(result, 4, "have an embedding with NaN or infinity")


def test_the_version():

    assert fastsim.__version__ in run("--version").output


def test_every_command_has_the_options_that_its_errors_name(tmp_path):
    file = tmp_path / "pairs.csv"
    rows = [f"{row[0]};{row[1]}\n" for row in KEPT[:8]]
    assert not any('"' in row or row.count(";") > 1 for row in rows)
    file.write_text("".join(["anchor;positive\n", *rows]))
    model = ("--model", models.tiny_bert(), "--cpu")
    for command in (
        ("evaluate", *model, "--data", file),
        ("mine", *model, "--pairs", file, "--output", tmp_path / "mined.jsonl"),
    ):
        one_line(run(*command), 3, "try --delimiter ';'")
        result = run(*command, "--delimiter", ";")
        assert result.exit_code == 0, result.output
    file.write_text("question,answer\nhow do I reset the phone,press it for ten seconds\n" * 2)
    for command in (
        ("evaluate", *model, "--data", file),
        ("mine", *model, "--pairs", file, "--output", tmp_path / "more.jsonl"),
    ):
        columns = ("--columns", "anchor,positive")
        one_line(run(*command, *columns), 3, "or use --no-header")
        result = run(*command, *columns, "--no-header")
        assert result.exit_code == 0, result.output

"""The command line: what it prints, its exit codes, its one-line errors."""

import errno
import json
import math
import os
import stat

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("datasets")
from fastsim.cli import command
from fastsim.cli import main as cli
from fastsim.encoders.names import ModelError
from fastsim.files import OutputError
from fastsim.training import demo
from fastsim.training.data import DataError
from tests import models

KEPT, HELD = demo.situations()


@pytest.fixture
def data(tmp_path):
    return demo.write_pairs(KEPT[:8], tmp_path / "train.jsonl")


def run(*arguments):
    return CliRunner().invoke(cli.main, [str(part) for part in arguments])


def train(data, output, *more, loss="cosent"):
    model = ("--model", models.tiny_bert(), "--max-length", 32, "--batch-size", 8, "--cpu")
    files = ("--train", data, "--loss", loss, "--output", output, "--no-progress")
    return run("train", *model, *files, *more)


def test_help_has_an_example():
    for name in cli.main.commands:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert f"Example: fastsim {name}" in result.output
    listed = run("--help").output.partition("Commands:")[2]
    assert "..." not in listed  # the first sentence of each command is whole


@pytest.mark.parametrize("name", cli.main.commands)
def test_help_says_what_an_option_takes(name):
    """Such as STEPS or RATE; by default click says FLOAT RANGE."""
    words = run(name, "--help").output.split()
    assert not {"INTEGER", "FLOAT", "RANGE"}.intersection(words)


def test_train_evaluate_search(data, tmp_path):
    output = tmp_path / "model"
    result = train(data, output, "--eval", data, "--max-steps", 3)
    assert result.exit_code == 0, result.output
    assert "spearman_cosine" in result.output
    assert (output / "pictures/similarity.png").read_bytes().startswith(b"\x89PNG")

    result = run("evaluate", "--model", output, "--data", data, "--json", "--cpu")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    saved = json.loads((output / "fastsim_training.json").read_text())
    assert found["spearman_cosine"] == pytest.approx(saved["after"]["spearman_cosine"], abs=1e-6)
    result = run("evaluate", "--model", output, "--data", data, "--cpu")
    assert "spearman_cosine" in result.output

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(models.texts(12)))
    query = models.texts(12)[5]
    result = run(
        *("search", "--model", output, "--corpus", corpus, "--query", query, "--top-k", 3),
        *("--json", "--cpu"),
    )
    hits = json.loads(result.stdout)[0]["hits"]
    assert [hit["rank"] for hit in hits] == [1, 2, 3]
    assert (hits[0]["text"], hits[0]["row"]) == (query, 5)
    assert hits[0]["score"] == pytest.approx(1, abs=1e-5)
    result = run("search", "--model", output, "--corpus", corpus, "--query", query)
    assert query in result.output
    for nothing in ("", " "):  # a variable of a script that is not set
        result = run("search", "--model", output, "--corpus", corpus, "--query", nothing)
        one_line(result, command.USAGE, "'--query': wanted a non-empty text, got '")
    for name, given in (("--query", "caf\udce9"), ("--prompt", "query=caf\udce9")):
        result = run("search", "--corpus", corpus, "--query", query, name, given)
        one_line(result, command.USAGE, f"'{name}': wanted a text in UTF-8, got 'caf\\udce9'")
    (tmp_path / "notes.md").write_text("one\n")
    result = run("search", "--corpus", tmp_path / "notes.md", "--query", query)
    one_line(result, command.DATA, "notes.md: wanted a suffix in", ".parquet, .txt")
    assert "--format" not in result.stderr  # which is of the answers


def one_line(result, code, *parts):
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert [line.startswith("Error: ") for line in lines] == [False] * (len(lines) - 1) + [True]
    for part in parts:
        assert part in lines[-1]


def test_errors_are_one_line(data, tmp_path):
    out = tmp_path / "out"
    one_line(train(data, out, loss="cosend"), command.USAGE, "one of cosent, angle", "'cosend'")
    one_line(train(data, out, loss="info_nce"), command.USAGE, "got 'info_nce'")
    one_line(train(tmp_path / "no.csv", out), command.DATA, "no.csv: no such file")
    long = run("evaluate", "--data", f"{'x' * 300}.csv")
    one_line(long, command.DATA, ".csv: cannot be read: File name too long")
    broken = tmp_path / "broken.csv"
    broken.write_text("sentence1,sentence2,score\na,b,1\na,b,c\n")
    one_line(train(broken, out), command.DATA, "broken.csv, line 3: score: wanted a number")
    (tmp_path / "empty").mkdir()
    one_line(train(data, out, "--model", tmp_path / "empty"), command.MODEL, "neither modules.json")
    file = tmp_path / "file"
    file.touch()
    one_line(train(data, file), command.OUTPUT, "wanted a folder")
    one_line(train(data, file / "below"), command.OUTPUT, "output: ")
    one_line(train(data, out, "--best-metric", "x"), command.USAGE, "best_metric: needs eval")
    one_line(run("evaluate", "--model", tmp_path / "empty", "--data", data), command.MODEL)
    assert not out.exists()
    result = train(data, out, "--learning-rate", "-1")
    assert result.exit_code == command.USAGE


class StoppedError(Exception):
    signal = 15


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("one\nmore"), command.USAGE, "Error: one"),
        (DataError("rows"), command.DATA, "Error: rows"),
        (ModelError("weights"), command.MODEL, "Error: weights"),
        (OutputError("folder"), command.OUTPUT, "Error: folder"),
        (OutputError(errno.ENOSPC, "disk full"), command.OUTPUT, "Error: disk full"),
        (PermissionError(errno.EACCES, "x"), command.OUTPUT, "Error: PermissionError: [Errno 13]"),
        (RuntimeError("os error 28"), command.OUTPUT, "Error: RuntimeError: os error 28"),
        (KeyError("k"), command.FAILED, "Error: KeyError: 'k'"),
        (RuntimeError(), command.FAILED, "Error: RuntimeError: "),
        (StoppedError("by the system"), 128 + 15, "by the system"),
    ],
)
def test_every_kind_of_error_has_its_code(error, code, said):
    @click.command(cls=command.Command)
    def fails():
        raise error

    result = CliRunner().invoke(fails)
    assert result.exit_code == code
    (line,) = result.stderr.splitlines()
    assert line.startswith(said)


def test_ctrl_c_has_the_code_of_a_shell():
    @click.command(cls=command.Command)
    def stopped():
        raise KeyboardInterrupt

    result = CliRunner().invoke(stopped)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Aborted!\n")
    assert all(isinstance(each, command.Command) for each in cli.main.commands.values())


@click.command(cls=command.Command)
def stops_reading():
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_reader_that_has_enough_is_no_error():
    """As with `| head`."""
    result = CliRunner().invoke(stops_reading)
    assert (result.exit_code, result.stderr) == (1, "")


TAKEN = [
    (command.Range, "0,5.5", (0.0, 5.5)),
    (command.Setting, "scale=5", ("scale", 5)),
    (command.Setting, "symmetric=true", ("symmetric", True)),
    (command.Setting, "mining=hard", ("mining", "hard")),
    (command.Prompt, "query=a = b: ", ("query", "a = b: ")),
    (command.Prompt, "query=", ("query", "")),
    (command.Widths, "8,4", (8, 4)),
]
WRONG = [
    *((command.Range, text) for text in ("1", "1,2,3", "a,b")),
    *((command.Setting, text) for text in ("scale=", "=5", "scale")),
    *((command.Prompt, text) for text in ("=text", "query")),
    *((command.Widths, text) for text in ("8,8", "0", "8,-4", "8.5", "")),
]


def test_values_of_options():
    for kind, text, wanted in TAKEN:
        assert kind().convert(text, None, None) == wanted
    for kind, text in WRONG:
        with pytest.raises(click.BadParameter, match=f"wanted .* got {text!r}"):
            kind().convert(text, None, None)


def test_a_table_of_metrics_and_its_numbers():
    found = {"before": {"ndcg@10": 0.25, "mrr@10": math.nan}}
    found["at the end"] = {"ndcg@10": 1.0, "mrr@10": 0.0}
    assert command.table(found).splitlines() == [
        "           before  at the end",
        "ndcg@10    0.2500      1.0000",
        "mrr@10        nan      0.0000",
    ]
    assert command.finite(found["before"]) == {"ndcg@10": 0.25, "mrr@10": None}


def test_an_unknown_model_name_is_one_line(data, tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*arguments, **options):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    result = train(data, tmp_path / "out", "--model", "no/such-model")
    one_line(result, command.MODEL, "'no/such-model' is not a folder here", "ConnectionError")


def test_a_full_disk(data, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*arguments, **options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = train(data, tmp_path / "out", "--max-steps", 1)
    one_line(result, command.OUTPUT, "disk full: cannot write", "checkpoint-1")
    assert not (tmp_path / "out/modules.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(data, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    one_line(train(data, folder / "out"), command.OUTPUT, "Permission denied")


def test_debug_shows_the_traceback(data, tmp_path):
    result = train(data, tmp_path / "out", "--debug", loss="cosend")
    assert isinstance(result.exception, ValueError)


def test_seeds_are_those_that_every_library_takes():
    for name in ("demo", "mine", "train"):
        result = run(name, "--seed", 2**32)
        one_line(result, command.USAGE, "'--seed': 4294967296 is not in the range")


def test_demo(tmp_path):
    result = run("demo", "--model", models.tiny_bert(), "--output", tmp_path / "d", "--no-progress")
    assert result.exit_code == 0, result.output
    assert "before" in result.output
    assert {path.name for path in (tmp_path / "d/pictures").iterdir()} == {
        *("curves.png", "cosines.png", "similarity.png")
    }


def test_the_demos_sentences_are_ours_to_check():
    rows = KEPT + HELD
    texts = [text for row in rows for text in row]
    assert len(set(texts)) == len(texts) == 4 * len(rows)
    assert not {t for row in KEPT for t in row} & {t for row in HELD for t in row}

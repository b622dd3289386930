"""`fastsim mine`: pairs get the negatives that are hardest within limits."""

import errno
import inspect
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
import fastsim
from fastsim.cli.mine import mine
from fastsim.encoders.encoder import Encoder
from fastsim.training import demo, load
from tests import models
from tests.cli.test_cli import one_line, run, train

KEPT, _ = demo.situations()


def test_mine_writes_triplets_that_train(tuples, tmp_path):
    output = tmp_path / "mined.jsonl"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(row[2] for row in KEPT[:24]) + "\n" + KEPT[0][0])
    result = run(
        *("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--corpus", corpus),
        *("--output", output, "--count", 2, "--cpu"),
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["anchor"] for row in rows] == [row[0] for row in KEPT[:24]]
    positives = {row["anchor"]: row["positive"] for row in rows}
    for row in rows:
        negatives = {row["negative"], row["negative_2"]}
        assert len(negatives) == 2
        assert not negatives & {row["anchor"], positives[row["anchor"]]}
    # By hand for one of them.
    encoder = Encoder.from_pretrained(models.tiny_bert())
    texts = [row[1] for row in KEPT[:24]] + corpus.read_text().splitlines()
    vectors = encoder.encode(texts, normalize=True)
    scores = vectors @ encoder.encode([KEPT[3][0]], normalize=True)[0]
    best = [texts[i] for i in scores.argsort(descending=True).tolist() if texts[i] != KEPT[3][1]]
    assert [rows[3]["negative"], rows[3]["negative_2"]] == best[:2]
    result = train(output, tmp_path / "out", "--max-steps", 1, loss="info_nce")
    assert result.exit_code == 0, result.output
    result = run(
        *("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--corpus", corpus),
        *("--output", tmp_path / "second", "--first", 2, "--last", 2, "--cpu"),
    )
    assert result.exit_code == 0, result.output
    second = [json.loads(line) for line in (tmp_path / "second").read_text().splitlines()]
    assert [row["negative"] for row in second] == [row["negative_2"] for row in rows]


def test_mine_leaves_out_pairs_and_says_so(tuples, tmp_path):
    """Those without a negative so much less close than their positive."""
    encoder = Encoder.from_pretrained(models.tiny_bert())
    anchors, positives = (
        encoder.encode([row[part] for row in KEPT[:24]], normalize=True) for part in (0, 1)
    )
    scores = anchors @ positives.T
    own = scores.diagonal().clone()
    gaps = (own - scores.fill_diagonal_(-1).amax(1)).sort().values.tolist()
    command = ("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--cpu", "--last", 1)
    for left_out in (0, 7):
        margin = (gaps[left_out] + gaps[left_out - 1]) / 2 if left_out else gaps[0] - 0.1
        output = tmp_path / f"{left_out}.jsonl"
        result = run(*command, "--output", output, "--margin", margin)
        assert result.exit_code == 0, result.output
        assert len(output.read_text().splitlines()) == 24 - left_out
        assert result.stdout == f"{24 - left_out} rows: {output}\n"
        said = "left out 7 pairs with fewer than 1 negative within the limits\n" in result.stderr
        assert said == (left_out == 7)
    output = tmp_path / "none.jsonl"
    result = run(*command, "--output", output, "--margin", 3, "--count", 1)
    one_line(
        result,
        2,
        "pairs: wanted at least one pair with 1 negative within the limits, got none of",
    )
    assert not output.exists()


def test_mine_encodes_as_it_is_asked_to(tuples, tmp_path, monkeypatch):
    asked, load_encoder = [], load.load_encoder

    def loaded(model, **options):
        asked.append(options)
        return load_encoder(model, **options)

    monkeypatch.setattr(load, "load_encoder", loaded)
    command = ("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--cpu")
    more = ("--max-length", 5, "--prompt", "query=the : ", "--output", tmp_path / "mined.jsonl")
    result = run(*command, *more)
    assert result.exit_code == 0, result.output
    wanted = {"cpu": True, "max_length": 5, "prompts": {"query": "the : "}}
    assert [{name: one[name] for name in wanted} for one in asked] == [wanted]


def test_mine_has_the_limits_of_its_function():
    ranks = inspect.signature(fastsim.mine_hard_negatives).parameters["ranks"].default
    defaults = {option.name: option.default for option in mine.params}
    assert (defaults["first"], defaults["last"]) == ranks


def test_mine_writes_over_nothing_that_is_read_or_there(tuples, tmp_path, monkeypatch):
    def unused(*arguments, **options):
        raise AssertionError("the output is looked at before anything is encoded")

    corpus, there = tmp_path / "corpus.txt", tmp_path / "there.jsonl"
    corpus.write_text("one\n")
    there.write_text("mine")
    before = tuples.read_text()
    command = ("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--corpus", corpus)
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", unused)
        for output, *more, code, reason in (
            (tuples, "--overwrite", 5, "wanted another file than those read"),
            (corpus, "--overwrite", 5, "wanted another file than those read"),
            (there, 5, "exists; --overwrite"),
            (tmp_path, "--overwrite", 5, "wanted a file"),
            (tmp_path, 5, "wanted a file"),  # which --overwrite would not replace
            (tmp_path / "no/such", 5, "No such file"),
            (tmp_path / "new.csv", 5, "wanted a name that ends in .jsonl"),
            (tmp_path / "new.json", 5, "wanted a name that ends in .jsonl"),
            (tmp_path / "new.jsonl.gz", 5, "wanted a name that ends in .jsonl"),
            (tmp_path / "new", "--first", 5, "--last", 3, 2, "--last: wanted at least 5"),
        ):
            result = run(*command, "--output", output, "--cpu", *more)
            one_line(result, code, reason)
    assert (tuples.read_text(), corpus.read_text(), there.read_text()) == (before, "one\n", "mine")
    assert not (tmp_path / "new").exists()
    result = run(*command, "--output", there, "--overwrite", "--cpu")
    assert result.exit_code == 0, result.output
    assert json.loads(there.read_text().splitlines()[0])["anchor"] == KEPT[0][0]
    there.write_text('{"anchor": "a", "positive": "b", "negative": "c"}\n')
    result = run("mine", "--pairs", there, "--output", tmp_path / "new", "--cpu")
    one_line(result, 3, "wanted only the columns anchor and positive, got anchor, positive, nega")


def test_mine_takes_ranks_beyond_the_corpus(tuples, tmp_path):
    command = ("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--cpu")
    for first, code in ((1, 0), (10**20, 2)):
        output = tmp_path / f"{first}.jsonl"
        result = run(*command, "--output", output, "--first", first, "--last", 10**21)
        assert result.exit_code == code, result.output
    one_line(
        result,
        2,
        "pairs: wanted at least one pair with 1 negative within the limits, got none of",
    )


def test_a_folder_that_takes_no_file_is_told_before_the_work(tmp_path, monkeypatch):
    """Also where a file is written over, since the new one is made beside it."""
    from fastsim.files import OutputError
    from fastsim.training.mined import check_output

    def refused(**options):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "there.jsonl").touch()
    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    for name in ("there.jsonl", "new.jsonl"):
        with pytest.raises(OutputError, match=r"output: cannot write .*Permission denied"):
            check_output(tmp_path / name, overwrite=True)


def test_the_prompts_are_of_queries_and_documents():
    """The help of commands that search offers no others: a column's would be refused."""
    for name in ("mine", "search"):
        said = " ".join(run(name, "--help").output.split())
        assert "Text put before each query or document;" in said
        assert "column's name" not in said


def test_a_file_made_while_negatives_are_mined_is_kept(tuples, tmp_path, monkeypatch):
    """As if by another process, after the look at the output."""
    output, load_encoder = tmp_path / "mined.jsonl", load.load_encoder

    def loaded(model, **options):
        output.write_text("theirs")
        return load_encoder(model, **options)

    monkeypatch.setattr(load, "load_encoder", loaded)
    result = run("mine", "--model", models.tiny_bert(), "--pairs", tuples, "--output", output)
    assert result.exit_code == 0, result.output
    assert len(output.read_text().splitlines()) == 24
    assert (tmp_path / "mined.jsonl.old").read_text() == "theirs"
    assert "is kept as 'mined.jsonl.old'" in result.stderr

"""Mined negatives: what is known of the pairs, with embeddings by hand."""

import errno
import json
import math
import os

import pytest
import torch

pytest.importorskip("datasets")
from fastsim.encoders.names import ModelError
from fastsim.training import mined
from fastsim.training.mined import mine, write_rows
from tests.seeds import SEED
from tests.training.angles import Angles, Points


@pytest.fixture
def files(tmp_path):
    """(pairs of angles in degrees, a corpus of further ones)."""
    pairs = [("0", "1"), ("0", "4"), ("50", "51")]
    rows = [{"anchor": anchor, "positive": positive} for anchor, positive in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpus.txt").write_text("2\n0\n52\n90\n")
    return str(tmp_path / "pairs.jsonl"), str(tmp_path / "corpus.txt")


def test_no_positive_of_an_anchor_nor_itself_is_its_negative(files):
    pairs, corpus = files
    rows, left_out = mine(Angles(), pairs, corpus=corpus, count=2)
    assert left_out == 0
    assert rows == [
        {"anchor": "0", "positive": "1", "negative": "2", "negative_2": "51"},
        {"anchor": "0", "positive": "4", "negative": "2", "negative_2": "51"},
        {"anchor": "50", "positive": "51", "negative": "52", "negative_2": "90"},
    ]


def test_queries_and_documents_are_mined_with_their_prompts(files):
    pairs, corpus = files
    encoder = Angles(query="60", document="10")
    rows, _ = mine(encoder, pairs, corpus=corpus)
    assert [row["negative"] for row in rows] == ["51", "51", "90"]
    assert {prompt for prompt, text in encoder.asked if text == "50"} == {"60"}
    assert {prompt for prompt, text in encoder.asked if text == "90"} == {"10"}


def test_pairs_with_too_few_negatives_are_left_out_and_counted(files):
    """A cosine of 0.1 or less: 84 degrees away there is a text from 0, and none from 50."""
    pairs, corpus = files
    rows, left_out = mine(Angles(), pairs, corpus=corpus, margin=0.9)
    assert [row["negative"] for row in rows] == ["90", "90"]
    assert left_out == 1
    assert mine(Angles(), pairs, corpus=corpus, margin=0.9, count=2) == ([], 3)


def test_spaces_make_no_text_another(tmp_path):
    """Neither of a positive nor of an anchor; what is written is as the files have it."""
    pairs, corpus = tmp_path / "pairs.csv", tmp_path / "corpus.csv"
    pairs.write_text("anchor,positive\n0,1 \n 0,4\n50,51\n")
    corpus.write_text("text\n1\n 4\n0 \n 2\n90\n")
    rows, _ = mine(Angles(), str(pairs), corpus=str(corpus))
    assert rows == [
        {"anchor": "0", "positive": "1 ", "negative": " 2"},
        {"anchor": " 0", "positive": "4", "negative": " 2"},
        {"anchor": "50", "positive": "51", "negative": "90"},
    ]


def test_the_corpus_is_read_as_the_pairs_are(tmp_path):
    """With their delimiter and header, and of their kind where its suffix says none."""
    pairs, corpus = tmp_path / "pairs.csv", tmp_path / "corpus.csv"
    pairs.write_text("anchor;positive\n0;1\n50;51\n")
    corpus.write_text("id;text\n1;2\n2;90\n")
    rows, _ = mine(Angles(), str(pairs), corpus=str(corpus), delimiter=";")
    assert [row["negative"] for row in rows] == ["2", "90"]
    pairs.write_text("0,1\n50,51\n")
    corpus.write_text("2\n90\n")
    how = {"columns": "anchor,positive", "header": False}
    rows, _ = mine(Angles(), str(pairs), corpus=str(corpus), **how)
    assert [row["negative"] for row in rows] == ["2", "90"]
    (tmp_path / "corpus").write_text("2\n90\n")
    assert mine(Angles(), str(pairs), corpus=tmp_path / "corpus", kind="csv", **how)[0] == rows
    (tmp_path / "corpus.tsv").write_text("id\ttext\n1;\t2\n2\t90\n")
    pairs.write_text("anchor;positive\n0;1\n50;51\n")
    given = {"delimiter": ";", "kind": "csv"}  # of the pairs alone, as the suffix says
    assert mine(Angles(), str(pairs), corpus=tmp_path / "corpus.tsv", **given)[0] == rows


@pytest.fixture
def uneven(tmp_path):
    """Pairs of four anchors, with 1, 2, 9 and 40 positives, in no order."""
    rows = [
        {"anchor": str(anchor), "positive": f"{anchor + 0.125 * number:g}"}
        for anchor, count in ((10, 1), (20, 2), (30, 9), (40, 40))
        for number in range(1, count + 1)
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "uneven.jsonl"
    path.write_text("".join(json.dumps(rows[row]) + "\n" for row in order))
    return str(path)


@pytest.mark.parametrize("limits", [{}, {"relative_margin": 0.01, "ranks": (3, 8)}])
def test_pairs_of_unlike_counts_are_mined_as_all_at_once(limits, uneven, monkeypatch):
    found = mine(Angles(), uneven, count=2, **limits)
    monkeypatch.setattr(mined, "_groups", lambda counts: [list(range(len(counts)))])
    assert found == mine(Angles(), uneven, count=2, **limits)
    assert len(found[0]) > 40


def test_a_search_is_as_deep_as_pairs_of_its_kind_ask(uneven, monkeypatch):
    """One anchor of many positives leaves the tables of the others narrow."""
    tables, search = [], mined.mine_hard_negatives

    def spied(queries, corpus, table, **limits):
        tables.append(table)
        return search(queries, corpus, table, **limits)

    monkeypatch.setattr(mined, "mine_hard_negatives", spied)
    mine(Angles(), uneven)
    assert sorted(table.shape for table in tables) == [(1, 2), (2, 3), (9, 10), (40, 41)]


def test_drawn_negatives_are_those_of_the_seed(uneven):
    draws = [mine(Angles(), uneven, sample=True, seed=seed) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]
    rows, _ = draws[0]
    positives = {(row["anchor"], row["positive"]) for row in rows}
    assert all((row["anchor"], row["negative"]) not in positives for row in rows)


def test_draws_for_pairs_of_unlike_counts_are_independent(tmp_path):
    """Anchors of one positive and of two, which are searched apart, with as many neighbours each.

    Fair draws agree this often once in 1e9 runs (Hoeffding's bound).
    """
    count, texts = 300, [str(angle) for angle in range(10, 17)]
    rows = [
        {"anchor": f"0.{kind}{number:03}", "positive": positive}
        for number in range(count)
        for kind, positive in ((1, "1"), (2, "1"), (2, "2"))
    ]
    pairs, corpus = tmp_path / "pairs.jsonl", tmp_path / "corpus.txt"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus.write_text("\n".join(texts))
    found, _ = mine(Angles(), str(pairs), corpus=str(corpus), sample=True, seed=SEED)
    # In the order of the file, as the groups are searched.
    drawn = [
        [row["negative"] for row in found if row["anchor"].startswith(f"0.{kind}")][:count]
        for kind in (1, 2)
    ]
    agreed = sum(one == two for one, two in zip(*drawn, strict=True))
    chance = 1 / (len(texts) + 1)  # that of any of them for an anchor of one positive
    assert agreed / count <= chance + math.sqrt(math.log(1e9) / (2 * count))


def test_negatives_are_ranked_by_the_encoders_similarity(tmp_path):
    """With margins in its unit; by the cosine if there is no ranking by another."""
    pairs, corpus = tmp_path / "pairs.jsonl", tmp_path / "corpus.txt"
    pairs.write_text('{"anchor": "2,0", "positive": "4,3"}\n')
    corpus.write_text("1,0\n3,9\n5,7\n")  # with cosines 1, 0.3, 0.6 and dot products 2, 6, 10
    for similarity, limits, wanted in (
        ("dot", {}, "5,7"),
        ("dot", {"margin": 2.5}, "1,0"),  # of 8, the positive's
        ("dot", {"margin": 1.5}, "3,9"),
        ("dot", {"relative_margin": 0.3}, "1,0"),
        ("cosine", {}, "1,0"),
        ("cosine", {"margin": 0.1}, "5,7"),  # of 0.8, the positive's
        ("manhattan", {}, "1,0"),
    ):
        encoder = Points()
        encoder.similarity = similarity
        rows, _ = mine(encoder, str(pairs), corpus=str(corpus), **limits)
        assert [row["negative"] for row in rows] == [wanted], (similarity, limits)


@pytest.mark.parametrize("side", ["anchor", "positive"])
def test_embeddings_that_are_not_finite_are_the_models_fault(side, tmp_path):
    """Of queries as of documents."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"anchor": "1,0", "positive": "4,3"}, {"anchor": "0,1", "positive": "3,4"}]
    rows[1][side] = "nan,1"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ModelError, match="model: 1 of 2 texts have an embedding with NaN"):
        mine(Points(), str(pairs))


ROWS = [{"anchor": "a", "positive": "b", "negative": "ç"}]


@pytest.mark.parametrize("made", ["before", "at the last moment", "without hard links"])
def test_a_file_made_during_the_work_is_kept(made, tmp_path, monkeypatch, capfd):
    """Two of them, one after the other. What was mined is written all the same."""
    output, link = tmp_path / "mined.jsonl", os.link

    def late(source, target):
        monkeypatch.setattr(os, "link", link)  # once
        output.write_text("theirs")
        link(source, target)

    def refused(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    for name in ("mined.jsonl.old", "mined.jsonl.old2"):
        output.unlink(missing_ok=True)
        if made == "at the last moment":
            monkeypatch.setattr(os, "link", late)
        else:
            output.write_text("theirs")
        if made == "without hard links":
            monkeypatch.setattr(os, "link", refused)
        write_rows(ROWS, output)
        assert [json.loads(line) for line in output.read_text("utf-8").splitlines()] == ROWS
        assert (tmp_path / name).read_text() == "theirs"
        said = f"'{output}' was made by another process; it is kept as '{name}'\n"
        assert capfd.readouterr().err == said
    write_rows(ROWS, output, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3

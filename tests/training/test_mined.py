"""Mined negatives: what is known of the pairs, with embeddings by hand."""

import json

import pytest

pytest.importorskip("datasets")
from fastsim.training.mined import mine
from tests.training.test_evaluation import Angles


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

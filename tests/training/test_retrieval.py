"""Evaluation of searches: files in BEIR's layout, with embeddings by hand."""

import json
import math
import re

import pytest

pytest.importorskip("datasets")
from fastsim.encoders.names import ModelError
from fastsim.training import beir
from fastsim.training.beir import evaluate_retrieval, ranking_metrics, read_beir
from fastsim.training.data import DataError
from tests.training.angles import Angles, Points


def retrieval_set(folder, corpus, queries, judged="q\tx\t1\n"):
    """A folder in BEIR's layout."""
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels/test.tsv").write_text(judged)
    return folder


def test_ranking_metrics_by_hand():
    """Linear gains, as trec_eval; what is judged 0 or less is not relevant."""
    runs = {"one": ["d0", "d2", "none", "d1"], "two": [f"e{i}" for i in range(20)]}
    grades = {
        "one": {"d0": 1, "d1": 3, "d2": 0, "d3": -1, "d4": 2},
        "two": {f"e{i}": 1 for i in range(8, 20)},
    }
    found = ranking_metrics(runs, grades, depth=12)
    gain = 1 + 3 / math.log2(5)
    ideal = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    tail = sum(1 / math.log2(rank + 1) for rank in (9, 10))
    most = sum(1 / math.log2(rank + 1) for rank in range(1, 11))
    assert found["ndcg@10"] == pytest.approx((gain / ideal + tail / most) / 2)
    assert found["mrr@10"] == pytest.approx((1 + 1 / 9) / 2)
    assert found["recall@10"] == pytest.approx((2 / 3 + 2 / 12) / 2)
    assert found["recall@12"] == pytest.approx((2 / 3 + 4 / 12) / 2)


@pytest.mark.parametrize("rank", [1, 9, 10, 11, 12, 13])
def test_the_first_answer_counts_among_ten_and_in_the_depth(rank):
    runs = {"q": [f"d{place}" for place in range(1, 14)]}
    found = ranking_metrics(runs, {"q": {f"d{rank}": 1}}, depth=12)
    assert found == {
        "mrr@10": 1 / rank if rank <= 10 else 0,
        "ndcg@10": 1 / math.log2(rank + 1) if rank <= 10 else 0,
        "recall@10": rank <= 10,
        "recall@12": rank <= 12,
    }


@pytest.mark.parametrize("depth", [4, 11])
def test_a_search_is_as_deep_without_the_document_of_the_query(depth, tmp_path):
    """Which is the nearest; to another query it is an answer like any other."""
    documents = [{"_id": str(place), "text": str(place)} for place in range(depth + 3)]
    queries = [{"_id": "0", "text": "0"}, {"_id": "other", "text": "0"}]
    for query, last in (("0", depth), ("other", depth - 1)):
        for answer in (last, last + 1):
            judged = f"{query}\t{answer}\t1\n"
            folder = retrieval_set(tmp_path, documents, queries, judged)
            found = evaluate_retrieval(Angles(), folder, depth=depth)
            rank = depth + answer - last
            assert found[f"recall@{depth}"] == (rank <= depth)
            assert found["mrr@10"] == (1 / rank if rank <= min(depth, 10) else 0)


def test_queries_are_searched_in_parts(tmp_path, monkeypatch):
    """Each query has the answers of its own search. Five queries, the last part is short."""
    documents = [{"_id": f"d{place}", "text": str(10 * place)} for place in range(5)]
    queries = [{"_id": f"q{place}", "text": str(10 * place + 1)} for place in range(5)]
    judged = "".join(f"q{place}\td{place}\t1\n" for place in range(5))
    retrieval_set(tmp_path, documents, queries, judged)
    monkeypatch.setattr(beir, "_QUERIES", 2)
    assert evaluate_retrieval(Angles(), tmp_path)["mrr@10"] == 1


def test_a_search_is_that_of_its_files(tmp_path):
    """Titles are read before texts, a document is no answer to the query with its id."""

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(
        "corpus.jsonl",
        [
            {"_id": "x", "title": "", "text": "0"},
            {"_id": "y", "title": "1", "text": "e1"},  # "1 e1"
            {"_id": "z", "text": "20"},
        ],
    )
    write("queries.jsonl", [{"_id": "x", "text": "0"}, {"_id": "q", "text": "19"},
                            {"_id": "unjudged", "text": "7"}])  # fmt: skip
    (tmp_path / "qrels").mkdir()
    judged = "query-id\tcorpus-id\tscore\nx\ty\t1\nq\tz\t0\nq\ty\t2\nunjudged\tx\t0\n"
    (tmp_path / "qrels/test.tsv").write_text(judged)

    class Written(Angles):
        """Of a document with a title the two make the number."""

        def encode(self, texts, **options):
            return super().encode([text.replace(" ", "") for text in texts], **options)

    encoder = Written(query="1", document="2")
    found = evaluate_retrieval(encoder, tmp_path, depth=2)
    assert sorted(encoder.asked) == [("1", "0"), ("1", "19"), ("2", "0"), ("2", "1e1"), ("2", "20")]
    # Degrees of the documents: x 2, y 12, z 22. The query x, at 1, is answered by y before z; the
    # query q, at 20, by z before y.
    assert found["mrr@10"] == (1 + 1 / 2) / 2
    assert found["recall@2"] == 1
    assert found["ndcg@10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    with open(tmp_path / "qrels/test.tsv", "a") as handle:
        handle.write("q\ty\t2\nq\tz\t1\n")  # the first says what is known, the second does not
    with pytest.raises(DataError, match="line 7: 'z' is judged 0 and 1 for 'q'"):
        evaluate_retrieval(encoder, tmp_path)
    for judged, said in (
        ("x\ty\t1\nq\ty\t1.0\n", r"line 2: wanted .* an integer score, got 'q, y, 1\.0'$"),
        ("query\tdoc\trelevance\nx\ty\t1\n", "got 'query, doc, relevance'; a header ends in s"),
        ("x\n", "line 1: wanted query-id, corpus-id and an integer score, got 'x'"),
    ):
        (tmp_path / "qrels/test.tsv").write_text(judged)
        with pytest.raises(DataError, match=said):
            evaluate_retrieval(encoder, tmp_path)
    write("corpus.jsonl", [{"_id": "x", "title": "half", "text": "\ud800"}])
    with pytest.raises(DataError, match="line 1: text: the text holds half of a surrogate pair"):
        evaluate_retrieval(encoder, tmp_path)


def test_a_document_may_be_empty_and_a_query_not(tmp_path):
    """Some of BEIR's own FiQA are."""
    query = {"_id": "q", "text": "a"}
    documents = [
        {"_id": "x", "title": "", "text": ""},
        {"_id": "y", "title": None, "text": "b "},
        {"_id": "z", "title": " t", "text": "\n"},
    ]
    corpus, queries, _ = read_beir(retrieval_set(tmp_path, documents, [query]))
    assert corpus == {"x": "", "y": "b", "z": "t"}
    assert queries == {"q": "a"}
    for other in ({"_id": "v"}, {"_id": "v", "title": "", "contents": "c"}, {"text": ""}):
        retrieval_set(tmp_path, [*documents, other], [query])
        with pytest.raises(DataError, match=r"corpus\.jsonl, line 4: wanted _id and text"):
            read_beir(tmp_path)
    retrieval_set(tmp_path, documents, [query, {"_id": "p", "text": ""}])
    with pytest.raises(DataError, match=r"queries\.jsonl, line 2: wanted _id and text"):
        read_beir(tmp_path)


@pytest.mark.parametrize("value", [["a", "b"], 3, 0, False, {}])
def test_what_is_no_text_is_none_of_a_document(value, tmp_path):
    for field in ("title", "text"):
        row = {"_id": "x", "title": "a", "text": "b"} | {field: value}
        retrieval_set(tmp_path, [row], [{"_id": "q", "text": "a"}])
        said = re.escape(f"line 1: {field}: wanted a text, got {value!r}")
        with pytest.raises(DataError, match=said):
            read_beir(tmp_path)


def test_documents_are_ranked_by_the_encoders_similarity(tmp_path):
    documents = [{"_id": "near", "text": "1,0"}, {"_id": "long", "text": "5,5"}]
    judged = "q\tlong\t1\n"
    retrieval_set(tmp_path, documents, [{"_id": "q", "text": "2,0"}], judged)
    encoder = Points()
    assert evaluate_retrieval(encoder, tmp_path)["mrr@10"] == 1 / 2
    encoder.similarity = "dot"
    assert evaluate_retrieval(encoder, tmp_path)["mrr@10"] == 1
    encoder.similarity = "euclidean"
    with pytest.raises(ModelError, match="cosine or dot, got similarity_fn_name 'euclidean'"):
        evaluate_retrieval(encoder, tmp_path)
